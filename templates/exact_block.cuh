// The slow, exact form of a pixel of the 1-D block: expand, depthwise, activation and project in plain fp32 from global memory. It is taken when a
// hidden value does not survive its 16-bit type or the MMA's rounding.
#pragma once

namespace cutlass_sep {

/// In place of an activation, on a hidden value that will be stored as fp16: NaN where fp16 cannot hold it, which marks every sum that it enters.
template <class Element>
struct HalfOrNan {
  CUTLASS_DEVICE static float apply(float x) { return fabsf(x) < 65520.f ? x : __int_as_float(0x7fffffff); }
};

/// The hidden value e of channel `c` at position `l` (inside the sequence), in all lanes; to be called by the whole warp.
template <class Config>
CUTLASS_DEVICE float hidden_from_global(Arguments const& args, int n, int c, int l, int lane) {
  using Element = typename Config::Element;
  auto const* x = static_cast<Element const*>(args.block_x) + int64_t(n) * Config::kExpandC * args.w;
  auto const* weight = static_cast<Element const*>(args.expand_weight) + int64_t(c) * Config::kExpandC;
  float sum = 0.f;
  CUTLASS_PRAGMA_NO_UNROLL
  for (int k = lane; k < Config::kExpandC; k += 32)
    sum = fmaf(float(weight[k]), float(x[Config::kChannelsLast ? int64_t(l) * Config::kExpandC + k : int64_t(k) * args.w + l]), sum);
  CUTLASS_PRAGMA_UNROLL
  for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
  return Config::kExpandBias ? sum + float(static_cast<Element const*>(args.expand_bias)[c]) : sum;
}

/// Output channels [first, last) of position q of image n; to be called by the whole warp.
template <class Config>
CUTLASS_DEVICE void exact_block_pixel(Arguments const& args, int n, int first, int last, int q, int lane) {
  using Element = typename Config::Element;
  constexpr int kGroup = 8;  // output channels of a lane at a time
  auto const* dw_weight = static_cast<Element const*>(args.dw_weight);
  auto const* pw_weight = static_cast<Element const*>(args.pw_weight);
  CUTLASS_PRAGMA_NO_UNROLL
  for (int group = first; group < last && group < Config::kO; group += 32 * kGroup) {
    float sum[kGroup] = {};
    CUTLASS_PRAGMA_NO_UNROLL
    for (int c = 0; c < Config::kC; ++c) {
      float m = Config::kDwBias ? float(static_cast<Element const*>(args.dw_bias)[c]) : 0.f;
      CUTLASS_PRAGMA_NO_UNROLL
      for (int s = 0; s < Config::kKernelW; ++s) {
        int const l = q + s * Config::kDilationW - args.pad_left;
        if (l >= 0 && l < args.w) m = fmaf(float(dw_weight[int64_t(c) * Config::kKernelW + s]), hidden_from_global<Config>(args, n, c, l, lane), m);
      }
      m = Config::MidActivation::apply(m);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kGroup; ++i) {
        int const o = group + 32 * i + lane;
        if (o < last && o < Config::kO) sum[i] = fmaf(float(pw_weight[int64_t(o) * Config::kC + c]), m, sum[i]);
      }
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kGroup; ++i) {
      int const o = group + 32 * i + lane;
      if (o >= last || o >= Config::kO) continue;
      float value = sum[i] + (Config::kPwBias ? float(static_cast<Element const*>(args.pw_bias)[o]) : 0.f);
      int64_t const index =
          Config::kChannelsLast ? (int64_t(n) * args.w + q) * Config::kO + o : (int64_t(n) * Config::kO + o) * args.w + q;
      if constexpr (Config::kResidual) value += float(static_cast<Element const*>(args.block_x)[index]);
      static_cast<Element*>(args.y)[index] = Element(value);
    }
  }
}

}  // namespace cutlass_sep
