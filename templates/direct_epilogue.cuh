// Accumulators in the order of a pixel-major tile, from registers straight to y.
#pragma once

namespace cutlass_sep {

/// 4 x 4 words over the four lanes of a quad: lane t gives word k to lane k and gets it from lane k as word k of the result.
CUTLASS_DEVICE void transpose_quad(uint32_t (&word)[4], int t) {
  CUTLASS_PRAGMA_UNROLL
  for (int distance = 1; distance <= 2; distance *= 2) {
    bool const upper = t & distance;
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < 4; ++k) {
      if (k & distance) continue;
      uint32_t const got = __shfl_xor_sync(0xffffffffu, upper ? word[k] : word[k + distance], distance);
      if (upper) word[k] = got;
      else word[k + distance] = got;
    }
  }
}

/// Accumulators to y, with bias and activation. Lane: output channels 8j + 2t + i of the pixels in rows g (h = 0) and g + 8 (h = 1).
template <class Config>
struct DirectEpilogue {
  using G = Geometry<Config>;
  using Element = typename Config::Element;
  using Accumulator = float[Config::kBlocks][Config::kTileOc / 2];
  /// Units of 8 output channels that are finished and stored together: biases and activations of more would take too many registers.
  static constexpr int kGroup = Config::kTileOc % 32 == 0 ? 4 : 2;
  /// A quad's 16-bit pairs are exchanged, so that each lane stores 16 bytes of output channels.
  static constexpr bool kExchange = Config::kChannelsLast && Config::kVectorAccess && G::kElementBytes == 2 && kGroup == 4;

  /// Of the groups from unit `First` on; to be called by the whole warp. The lane's pixels start at (p, q). (A loop over groups with a
  /// long activation in it stays a loop, whatever the pragma says, and then keeps the accumulators in local memory.)
  template <int First = 0>
  CUTLASS_DEVICE static void store(Arguments const& args, Accumulator& acc, PixelScale<Config> const& scale, int n, int oc, int p, int q,
                                   int t) {
    finish(args, acc, scale, oc, First, t);
    if constexpr (Config::kResidual) add_residual(args, acc, n, oc + 2 * t, p, q, First);
    CUTLASS_PRAGMA_UNROLL
    for (int b = 0; b < Config::kBlocks; ++b) {
      if (p + b >= args.p) continue;
      if constexpr (Config::kChannelsLast) {
        CUTLASS_PRAGMA_UNROLL
        for (int h = 0; h < 2; ++h) store_channels(args, acc[b], n, oc, p + b, q + h, q + h < args.q, First, h, t);
      } else {
        store_columns(args, acc[b], n, oc, p + b, q, First, t);
      }
    }
    if constexpr (First + kGroup < Config::kTileOc / 8) store<First + kGroup>(args, acc, scale, n, oc, p, q, t);
  }

  CUTLASS_DEVICE static void finish(Arguments const& args, Accumulator& acc, PixelScale<Config> const& scale, int oc, int first, int t) {
    CUTLASS_PRAGMA_UNROLL
    for (int j = first; j < first + kGroup; ++j) {
      OutputChannels<Config> const channels(args, oc + 8 * j + 2 * t);
      CUTLASS_PRAGMA_UNROLL
      for (int b = 0; b < Config::kBlocks; ++b)
        CUTLASS_PRAGMA_UNROLL
        for (int h = 0; h < 2; ++h)
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < 2; ++i)
            acc[b][4 * j + 2 * h + i] = channels.finish(acc[b][4 * j + 2 * h + i], i, scale.inverse(b, h));
    }
  }

  /// Of a group. `oc`: the lane's first output channel.
  CUTLASS_DEVICE static void add_residual(Arguments const& args, Accumulator& acc, int n, int oc, int p, int q, int first) {
    auto const* const x = static_cast<Element const*>(args.block_x);
    CUTLASS_PRAGMA_UNROLL
    for (int j = first; j < first + kGroup; ++j)
      CUTLASS_PRAGMA_UNROLL
      for (int b = 0; b < Config::kBlocks; ++b)
        CUTLASS_PRAGMA_UNROLL
        for (int h = 0; h < 2; ++h)
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < 2; ++i)
            if (p + b < args.p && q + h < args.q && oc + 8 * j + i < Config::kO)
              acc[b][4 * j + 2 * h + i] += float(x[GlobalIndex<Config>::y(args, n, oc + 8 * j + i, p + b, q + h)]);
  }

  /// channels_last: a group of one pixel.
  CUTLASS_DEVICE static void store_channels(Arguments const& args, float const (&acc)[Config::kTileOc / 2], int n, int oc, int p, int q,
                                            bool inside, int first, int h, int t) {
    auto* const y = static_cast<Element*>(args.y);
    if constexpr (kExchange) {
      uint32_t word[4];
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < 4; ++k) word[k] = pack_pair<Element>(acc[4 * (first + k) + 2 * h], acc[4 * (first + k) + 2 * h + 1]);
      transpose_quad(word, t);
      int const o = oc + 8 * (first + t);
      if (inside && o < Config::kO)
        *reinterpret_cast<uint4*>(y + GlobalIndex<Config>::y(args, n, o, p, q)) = make_uint4(word[0], word[1], word[2], word[3]);
    } else if (inside) {
      int const o = oc + 2 * t;
      Element* const target = y + GlobalIndex<Config>::y(args, n, o, p, q);
      CUTLASS_PRAGMA_UNROLL
      for (int j = first; j < first + kGroup; ++j)
        pair(target + 8 * j, acc[4 * j + 2 * h], acc[4 * j + 2 * h + 1], o + 8 * j < Config::kO, o + 8 * j + 1 < Config::kO);
    }
  }

  /// contiguous: a group of two adjacent pixels.
  CUTLASS_DEVICE static void store_columns(Arguments const& args, float const (&acc)[Config::kTileOc / 2], int n, int oc, int p, int q,
                                           int first, int t) {
    int64_t const plane = int64_t(args.p) * args.q;
    int const o = oc + 2 * t;
    Element* const target = static_cast<Element*>(args.y) + GlobalIndex<Config>::y(args, n, o, p, q);
    CUTLASS_PRAGMA_UNROLL
    for (int j = first; j < first + kGroup; ++j)
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 2; ++i) {
        bool const inside = o + 8 * j + i < Config::kO;
        pair(target + (8 * j + i) * plane, acc[4 * j + i], acc[4 * j + 2 + i], inside && q < args.q, inside && q + 1 < args.q);
      }
  }

  /// Two adjacent elements; with vector access both are inside or none.
  CUTLASS_DEVICE static void pair(Element* target, float first, float second, bool first_inside, bool second_inside) {
    if constexpr (Config::kVectorAccess) {
      float const value[2] = {first, second};
      if (first_inside) *reinterpret_cast<cutlass::AlignedArray<Element, 2>*>(target) = convert_vector<Element>(value);
    } else {
      if (first_inside) target[0] = Element(first);
      if (second_inside) target[1] = Element(second);
    }
  }
};

}  // namespace cutlass_sep
