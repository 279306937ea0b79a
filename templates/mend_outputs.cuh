// In fp16, behind the pointwise kernel: pixels are made anew of whose depthwise outputs, which are in memory, fp16 does not hold all.
#pragma once

namespace cutlass_sep {

/// Of exact_block.cuh, which is not there without a kernel of the block.
template <class Config>
CUTLASS_DEVICE void exact_block_pixel(Arguments const& args, int n, int first, int last, int q, int lane);

/// `args.steps`: flags in the workspace, from kFlagOffset on, that say whether there is such a pixel. The depthwise outputs are `args.block_x`, or in
/// the block, whose pixels start from block_x, `args.x`.
template <class Config>
CUTLASS_DEVICE void mend_outputs(Arguments const& args) {
  using Element = typename Config::Element;
  constexpr bool kBlock = Config::kExpandC > 0;
  await_grid_before();
  admit_next_grid();
  auto const* const flags = reinterpret_cast<int const*>(static_cast<char const*>(args.workspace) + Config::kFlagOffset);
  int flagged = 0;
  for (int i = threadIdx.x; i < args.steps; i += blockDim.x) flagged |= flags[i];
  if (!__syncthreads_or(flagged)) return;
  auto const* const outputs = static_cast<Element const*>(kBlock ? args.x : args.block_x);
  int const lane = threadIdx.x % 32, pixels = args.p * args.q;
  int64_t const warps = int64_t(gridDim.x) * (blockDim.x / 32), own = int64_t(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  CUTLASS_PRAGMA_NO_UNROLL
  for (int64_t i = own; i < int64_t(args.n) * pixels; i += warps) {
    int const n = int(i / pixels), pixel = int(i % pixels);
    float check = 0.f;
    for (int c = lane; c < Config::kC; c += 32)
      check = fmaf(float(outputs[Config::kChannelsLast ? i * Config::kC + c : (int64_t(n) * Config::kC + c) * pixels + pixel]), 0.f, check);
    if (!__any_sync(0xffffffffu, check != check)) continue;
    if constexpr (kBlock) {
      exact_block_pixel<Config>(args, n, 0, Config::kO, pixel, lane);
    } else {
      CUTLASS_PRAGMA_NO_UNROLL
      for (int oc = lane * Config::kTileOc; oc < Config::kO; oc += 32 * Config::kTileOc)
        exact_pixel<Config>(args, n, oc, pixel / args.q, pixel % args.q);
    }
  }
}

}  // namespace cutlass_sep
