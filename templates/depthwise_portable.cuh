// Two more forms of the depthwise stage, for kernels that the fully unrolled form (depthwise_operand.cuh) would blow up.
#pragma once

namespace cutlass_sep {

/// Pixel-major tile in shared memory, looped over kernel rows and over blocks of taps: code and registers do not grow with the kernel.
template <class Config>
struct RolledDepthwise {
  using G = Geometry<Config>;
  using W = DepthwiseWeights<Config>;
  using Row = PixelMajorRow<Config>;
  using Value = typename DepthwiseOperand<Config>::Value;

  /// Where the unrolled form is the better one.
  static constexpr bool kNeeded = G::kTaps > 25 || Config::kKernelW > 8 || G::kWindowP > 32 || G::kWindowQ > 32;

  // The columns of a block of taps span a multiple of 8, so that the swizzle repeats from one block to the next. The number of taps is even, so
  // that the weights of each block start on 16 bytes.
  static constexpr int kPeriod = Config::kDilationW % 8 == 0 ? 1 : Config::kDilationW % 4 == 0 ? 2 : Config::kDilationW % 2 == 0 ? 4 : 8;
  static constexpr int kBlockTaps = kPeriod < 4 ? 4 : kPeriod;
  static constexpr int kBlocksOfTaps = Config::kKernelW / kBlockTaps;
  static constexpr int kRestTaps = Config::kKernelW % kBlockTaps;

  template <int Taps>
  CUTLASS_DEVICE static void add(Value& value, char const* row, int row_bytes, W const& weights, int kernel_row, int first_tap, int column,
                                 int t, int step_bytes) {
    float w[W::units(Taps) * 4];
    weights.template load_taps<Taps>(w, kernel_row, first_tap);
    CUTLASS_PRAGMA_UNROLL
    for (int p = 0; p < G::kLaneP; ++p)
      CUTLASS_PRAGMA_UNROLL
      for (int s = 0; s < Taps; ++s)
        CUTLASS_PRAGMA_UNROLL
        for (int h = 0; h < 2; ++h) {
          float x[G::kLaneChannels];
          uint32_t const offset = Row::column_offset(column + h * Config::kStrideW + s * Config::kDilationW, t);
          load_vector<typename Config::Element>(x, row + p * Config::kStrideH * row_bytes + (offset ^ step_bytes));
          CUTLASS_PRAGMA_UNROLL
          for (int j = 0; j < G::kLaneChannels; ++j) value[p][h][j] = fmaf(w[s * G::kLaneChannels + j], x[j], value[p][h][j]);
        }
  }

  /// `tile`: the lane's first window row; `column`: its first window column.
  CUTLASS_DEVICE static void compute(Value& value, char const* tile, int row_bytes, int atom_bytes, W const& weights, int column, int t,
                                     int step) {
    char const* row = tile + step / Row::kAtomSteps * atom_bytes;
    int const step_bytes = step % Row::kAtomSteps * 32;
    DepthwiseOperand<Config>::start(value, weights);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int r = 0; r < Config::kKernelH; ++r, row += Config::kDilationH * row_bytes) {
      CUTLASS_PRAGMA_NO_UNROLL
      for (int i = 0; i < kBlocksOfTaps; ++i)
        add<kBlockTaps>(value, row + i * (kBlockTaps * Config::kDilationW * Row::kColumnBytes), row_bytes, weights, r, i * kBlockTaps,
                        column, t, step_bytes);
      if constexpr (kRestTaps > 0)
        add<kRestTaps>(value, row + kBlocksOfTaps * (kBlockTaps * Config::kDilationW * Row::kColumnBytes), row_bytes, weights, r,
                       kBlocksOfTaps * kBlockTaps, column, t, step_bytes);
    }
    DepthwiseOperand<Config>::finish(value);
  }
};

/// Straight from global memory, tap by tap: needs no window, so no kernel is too big for it.
template <class Config>
struct GatheredDepthwise {
  using G = Geometry<Config>;
  using W = DepthwiseWeights<Config>;
  using Element = typename Config::Element;
  using Value = typename DepthwiseOperand<Config>::Value;

  /// kLaneChannels channels from `c` on of pixel (h, w), zero outside the image and past C.
  CUTLASS_DEVICE static void load(float (&x)[G::kLaneChannels], Arguments const& args, int n, int c, int h, int w) {
    bool const inside = unsigned(h) < unsigned(args.h) && unsigned(w) < unsigned(args.w);
    auto const* source = static_cast<Element const*>(args.x);
    if constexpr (Config::kChannelsLast && Config::kVectorAccess) {  // C is a multiple of kLaneChannels
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < G::kLaneChannels; ++j) x[j] = 0.f;
      if (inside && c < Config::kC) load_vector<Element>(x, source + GlobalIndex<Config>::x(args, n, c, h, w));
    } else {
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < G::kLaneChannels; ++j)
        x[j] = inside && c + j < Config::kC ? float(source[GlobalIndex<Config>::x(args, n, c + j, h, w)]) : 0.f;
    }
  }

  /// The lane's channels start at `c` and its pixels at (p, q).
  CUTLASS_DEVICE static void compute(Value& value, Arguments const& args, W const& weights, int n, int c, int p, int q) {
    DepthwiseOperand<Config>::start(value, weights);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int r = 0; r < Config::kKernelH; ++r)
      CUTLASS_PRAGMA_NO_UNROLL
      for (int s = 0; s < Config::kKernelW; ++s) {
        float w[G::kLaneChannels];
        load_vector<float>(w, weights.tap(r, s));
        CUTLASS_PRAGMA_UNROLL
        for (int b = 0; b < G::kLaneP; ++b)
          CUTLASS_PRAGMA_UNROLL
          for (int h = 0; h < 2; ++h) {
            float x[G::kLaneChannels];
            load(x, args, n, c, (p + b) * Config::kStrideH + r * Config::kDilationH - args.pad_top,
                 (q + h) * Config::kStrideW + s * Config::kDilationW - args.pad_left);
            CUTLASS_PRAGMA_UNROLL
            for (int j = 0; j < G::kLaneChannels; ++j) value[b][h][j] = fmaf(w[j], x[j], value[b][h][j]);
          }
      }
    DepthwiseOperand<Config>::finish(value);
  }
};

}  // namespace cutlass_sep
