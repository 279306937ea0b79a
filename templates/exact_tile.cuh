// The slow, exact form of one warp's tile: plain fp32 FMA from global memory, taken when a value does not survive the MMA's rounding, so
// that Inf, NaN and values beyond fp16's range land where fp32 arithmetic puts them.
#pragma once

namespace cutlass_sep {

/// Pixel indices into x and y.
template <class Config>
struct GlobalIndex {
  CUTLASS_DEVICE static int64_t x(Arguments const& args, int n, int c, int h, int w) {
    return Config::kChannelsLast ? ((int64_t(n) * args.h + h) * args.w + w) * Config::kC + c
                                 : ((int64_t(n) * Config::kC + c) * args.h + h) * args.w + w;
  }
  CUTLASS_DEVICE static int64_t y(Arguments const& args, int n, int o, int p, int q) {
    return Config::kChannelsLast ? ((int64_t(n) * args.p + p) * args.q + q) * Config::kO + o
                                 : ((int64_t(n) * Config::kO + o) * args.p + p) * args.q + q;
  }
};

/// Depthwise output of channel c at pixel (p, q), before the mid activation, straight from global memory.
template <class Config>
CUTLASS_DEVICE float depthwise_from_global(Arguments const& args, int n, int c, int p, int q) {
  using Element = typename Config::Element;
  auto const* x = static_cast<Element const*>(args.x);
  if constexpr (!Config::kDepthwise) return float(x[GlobalIndex<Config>::x(args, n, c, p, q)]);
  auto const* weight = static_cast<Element const*>(args.dw_weight) + int64_t(c) * Config::kKernelH * Config::kKernelW;
  float sum = Config::kDwBias ? float(static_cast<Element const*>(args.dw_bias)[c]) : 0.f;
  CUTLASS_PRAGMA_NO_UNROLL
  for (int r = 0; r < Config::kKernelH; ++r) {
    int const h = p * Config::kStrideH + r * Config::kDilationH - args.pad_top;
    if (h < 0 || h >= args.h) continue;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int s = 0; s < Config::kKernelW; ++s) {
      int const w = q * Config::kStrideW + s * Config::kDilationW - args.pad_left;
      if (w < 0 || w >= args.w) continue;
      sum = fmaf(float(weight[r * Config::kKernelW + s]), float(x[GlobalIndex<Config>::x(args, n, c, h, w)]), sum);
    }
  }
  return sum;
}

/// One lane: output channels [oc, oc + kTileOc) of pixel (p, q) of image n.
template <class Config>
CUTLASS_DEVICE void exact_pixel(Arguments const& args, int n, int oc, int p, int q) {
  using Element = typename Config::Element;
  constexpr int kGroup = 8;
  auto const* pw_weight = static_cast<Element const*>(args.pw_weight);
  auto* y = static_cast<Element*>(args.y);
  CUTLASS_PRAGMA_NO_UNROLL
  for (int first = oc; first < oc + Config::kTileOc && first < Config::kO; first += kGroup) {
    float sum[kGroup] = {};
    CUTLASS_PRAGMA_NO_UNROLL
    for (int c = 0; c < Config::kC; ++c) {
      float const m = Config::MidActivation::apply(depthwise_from_global<Config>(args, n, c, p, q));
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kGroup; ++i)
        if (first + i < Config::kO) sum[i] = fmaf(float(pw_weight[int64_t(first + i) * Config::kC + c]), m, sum[i]);
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kGroup; ++i) {
      if (first + i >= Config::kO) continue;
      float const bias = Config::kPwBias ? float(static_cast<Element const*>(args.pw_bias)[first + i]) : 0.f;
      float value = Config::Activation::apply(sum[i] + bias);
      int64_t const index = GlobalIndex<Config>::y(args, n, first + i, p, q);
      if constexpr (Config::kResidual) value += float(static_cast<Element const*>(args.block_x)[index]);
      y[index] = Element(value);
    }
  }
}

/// Of exact_block.cuh, which is not there without a kernel of the block.
template <class Config>
CUTLASS_DEVICE void exact_block_pixel(Arguments const& args, int n, int first, int last, int q, int lane);

/// The whole warp: output channels [oc, oc + kTileOc) of the warp's kWarpP x kWarpQ pixels from (p, q) on.
template <class Config>
CUTLASS_DEVICE void exact_pixels(Arguments const& args, int n, int oc, int p, int q, int lane) {
  using G = Geometry<Config>;
  if constexpr (Config::kExpandC > 0) {
    CUTLASS_PRAGMA_NO_UNROLL
    for (int i = 0; i < G::kWarpQ && q + i < args.q; ++i) exact_block_pixel<Config>(args, n, oc, oc + Config::kTileOc, q + i, lane);
  } else {
    CUTLASS_PRAGMA_NO_UNROLL
    for (int i = lane; i < G::kWarpQ * G::kWarpP; i += 32) {
      int const exact_p = p + i / G::kWarpQ, exact_q = q + i % G::kWarpQ;
      if (exact_p >= G::map_p(args) || exact_q >= G::map_q(args)) continue;
      if constexpr (G::kRuns) exact_pixel<Config>(args, n, oc, exact_q / args.q, exact_q % args.q);
      else exact_pixel<Config>(args, n, oc, exact_p, exact_q);
    }
  }
}

}  // namespace cutlass_sep
