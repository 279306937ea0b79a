// The depthwise stage as a kernel of its own, by fp32 FMA from global memory: channels_last, a vector of 16 bytes of channels and kThreadRows x
// kThreadColumns outputs a thread. Outputs go to `args.y`, the x of the pointwise kernel behind.
//
// A block has the taps of a slab of channels in shared memory and goes over the outputs of all images. Threads side by side have channels side by
// side, then columns. What zero times a tap spoils that is not finite is made anew from the taps inside the map.
#pragma once

namespace cutlass_sep {

template <class Config>
struct DirectLayout {
  using Element = typename Config::Element;
  static constexpr int kP = Config::kThreadRows, kQ = Config::kThreadColumns, kTaps = Config::kKernelH * Config::kKernelW;
  /// Channels of a thread.
  static constexpr int kVector = 16 / sizeof(Element);
  static_assert(Config::kChannelsLast && Config::kC % kVector == 0);
  /// A step: a row of x under a thread's outputs, and so many taps of a row of the kernel.
  static constexpr int kRowSteps = Config::kKernelW <= 5 ? 1 : ceil_div(Config::kKernelW, 4), kStepTaps = ceil_div(Config::kKernelW, kRowSteps);
  /// Rows of outputs share rows of x, each of which has a tap; those under one row may be apart.
  static_assert(kP == 1 || (Config::kDilationH == 1 && Config::kStrideH <= Config::kKernelH && Config::kKernelH > 1));
  static constexpr int kRowPitch = kP == 1 ? Config::kDilationH : 1;
  static constexpr int kSteps = ((kP - 1) * Config::kStrideH + Config::kKernelH) * kRowSteps;
  /// Columns under a step's taps, from the first to the last; where taps have none in common, each has its own.
  static constexpr int kReach = (kQ - 1) * Config::kStrideW + (kStepTaps - 1) * Config::kDilationW + 1;
  static constexpr bool kShares = kReach < kQ * kStepTaps;
  static constexpr int kColumns = kShares ? kReach : kQ * kStepTaps;
  /// Threads of a block, of which a multiprocessor has two, by the registers of one: outputs, columns of two steps, taps, and what else there is.
  static constexpr int kRegisters = kVector * (kP * kQ + kStepTaps) + 8 * kColumns + 40;
  static constexpr int kThreads = kRegisters <= 128 ? 256 : kRegisters <= 168 ? 192 : 128;
  /// Vectors of all channels, of a slab: as many as divide the channels well.
  static constexpr int kVectors = Config::kC / kVector, kSlabs = ceil_div(kVectors, Config::kMostLanes), kLanes = ceil_div(kVectors, kSlabs);
  static constexpr int kUnits = kThreads / kLanes;
  /// Taps in fp32: [tap][quarter of 4 channels of a vector][vector][4 channels].
  static constexpr int kQuarters = kVector / 4, kTapsBytes = kTaps * kLanes * kVector * 4, kSharedBytes = kTapsBytes;
};

/// One thread's outputs: sum[p][q][channel].
template <class Config>
struct DirectDepthwise {
  using L = DirectLayout<Config>;
  using Element = typename L::Element;
  using Sums = float[L::kP][L::kQ][L::kVector];
  using Columns = uint4[L::kColumns];

  /// `x`: the vector of the window's first pixel, row h and column w of its map, which may be outside. `taps`: the vector's.
  CUTLASS_DEVICE static void compute(Sums& sum, Arguments const& args, Element const* x, int h, int w, float4 const* taps) {
    Columns even, odd;  // those of a step are asked for a step before
    load(even, args, x, h, w, 0);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int step = 0; step + 1 < L::kSteps; step += 2) {
      load(odd, args, x, h, w, step + 1);
      accumulate(sum, even, step, taps);
      if (step + 2 < L::kSteps) load(even, args, x, h, w, step + 2);
      accumulate(sum, odd, step + 1, taps);
    }
    if constexpr (L::kSteps % 2 != 0) accumulate(sum, even, L::kSteps - 1, taps);
  }

 private:
  CUTLASS_DEVICE static void load(Columns& columns, Arguments const& args, Element const* x, int h, int w, int step) {
    int const row = step / L::kRowSteps * L::kRowPitch, first = w + step % L::kRowSteps * L::kStepTaps * Config::kDilationW;
    // Columns of a row outside the map are outside too.
    int const width = uint32_t(h + row) < uint32_t(args.h) ? args.w : 0;
    Element const* const from = x + (int64_t(row) * args.w + (first - w)) * Config::kC;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < L::kColumns; ++i) {
      int const column = L::kShares ? i : i % L::kQ * Config::kStrideW + i / L::kQ * Config::kDilationW;
      columns[i] = uint32_t(first + column) < uint32_t(width) ? *reinterpret_cast<uint4 const*>(from + int64_t(column) * Config::kC) : uint4{};
    }
  }

  CUTLASS_DEVICE static void accumulate(Sums& sum, Columns const& columns, int step, float4 const* taps) {
    int const row = step / L::kRowSteps, first = step % L::kRowSteps * L::kStepTaps;
    CUTLASS_PRAGMA_UNROLL
    for (int p = 0; p < L::kP; ++p) {
      int const r = row - p * Config::kStrideH;
      if (L::kP > 1 && (r < 0 || r >= Config::kKernelH)) continue;
      int const count = L::kRowSteps == 1 ? L::kStepTaps : Config::kKernelW - first;
      float tap[L::kStepTaps][L::kVector];
      CUTLASS_PRAGMA_UNROLL
      for (int s = 0; s < L::kStepTaps; ++s)
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < L::kVector; i += 4) {
          float4 four = {};
          if (s < count) four = taps[((r * Config::kKernelW + first + s) * L::kQuarters + i / 4) * L::kLanes];
          tap[s][i] = four.x, tap[s][i + 1] = four.y, tap[s][i + 2] = four.z, tap[s][i + 3] = four.w;
        }
      CUTLASS_PRAGMA_UNROLL
      for (int column = 0; column < L::kColumns; ++column) {
        float value[L::kVector];
        load_vector<Element>(value, &columns[column]);
        CUTLASS_PRAGMA_UNROLL
        for (int s = 0; s < L::kStepTaps; ++s) {
          int const across = column - s * Config::kDilationW, q = L::kShares ? across / Config::kStrideW : column % L::kQ;
          if (L::kShares ? across < 0 || q >= L::kQ || across != q * Config::kStrideW : column / L::kQ != s) continue;
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < L::kVector; ++i) sum[p][q][i] = fmaf(tap[s][i], value[i], sum[p][q][i]);
        }
      }
    }
  }
};

/// Whether all of a vector of 16 bytes are finite.
template <class Element, int N>
CUTLASS_DEVICE bool is_finite(cutlass::AlignedArray<Element, N> const& vector) {
  if constexpr (sizeof(Element) == 2) {
    auto const* const pair = reinterpret_cast<uint32_t const*>(&vector);
    uint32_t vanished = 0;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < N / 2; ++i) vanished = add_vanished<Element>(pair[i], vanished);
    return vanished == 0;
  } else {
    float vanished = 0.f;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < N; ++i) vanished = fmaf(vector[i], 0.f, vanished);
    return vanished == 0.f;
  }
}

template <class Config>
CUTLASS_DEVICE void direct_depthwise(Arguments const& args, float4* taps) {
  using L = DirectLayout<Config>;
  using Element = typename L::Element;
  using D = DirectDepthwise<Config>;
  int const slab = blockIdx.x % L::kSlabs, first = slab * L::kLanes * L::kVector;
  // Of the weights, which no kernel of the call makes, a vector in their order at a time.
  auto const* const weight = static_cast<uint4 const*>(args.dw_weight) + int64_t(slab) * L::kLanes * L::kTaps;
  int const there = min(L::kLanes, L::kVectors - slab * L::kLanes) * L::kTaps;
  #pragma unroll 4
  for (int i = threadIdx.x; i < there; i += L::kThreads) {
    float value[L::kVector];
    load_vector<Element>(value, weight + i);
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < L::kVector; ++k) {
      int const c = (L::kVector * i + k) / L::kTaps, tap = (L::kVector * i + k) % L::kTaps;
      reinterpret_cast<float*>(taps)[((tap * L::kQuarters + c / 4 % L::kQuarters) * L::kLanes + c / L::kVector) * 4 + c % 4] = value[k];
    }
  }
  // x is what a kernel of the call has made, or was there before: then the launch that packs weights for the next kernel need not be over.
  if constexpr (Config::kOfBlock) await_grid_before();
  admit_next_grid();
  __syncthreads();
  int const lane = threadIdx.x % L::kLanes, own = threadIdx.x / L::kLanes, c = first + lane * L::kVector;
  int const across = ceil_div(args.q, L::kQ), down = ceil_div(args.p, L::kP);
  int const units = own < L::kUnits && c < Config::kC ? args.n * down * across : 0;
  bool infinite = false;
  CUTLASS_PRAGMA_NO_UNROLL
  for (int unit = blockIdx.x / L::kSlabs * L::kUnits + own; unit < units; unit += gridDim.x / L::kSlabs * L::kUnits) {
    int const strip = unit / across, q = (unit - strip * across) * L::kQ, n = strip / down, p = (strip - n * down) * L::kP;
    typename D::Sums sum;
    {
      float bias[L::kVector] = {};
      if constexpr (Config::kDwBias) load_vector<Element>(bias, static_cast<Element const*>(args.dw_bias) + c);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < L::kP; ++i)
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < L::kQ; ++j)
          CUTLASS_PRAGMA_UNROLL
          for (int k = 0; k < L::kVector; ++k) sum[i][j][k] = bias[k];
    }
    int const h = p * Config::kStrideH - args.pad_top, w = q * Config::kStrideW - args.pad_left;
    D::compute(sum, args, static_cast<Element const*>(args.x) + GlobalIndex<Config>::x(args, n, c, h, w), h, w, taps + lane);
    Element* const y = static_cast<Element*>(args.y) + ((int64_t(n) * args.p + p) * args.q + q) * Config::kC + c;
    bool spoiled = false;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < L::kP; ++i)
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < L::kQ; ++j)
        if (p + i < args.p && q + j < args.q) {
          float value[L::kVector];
          CUTLASS_PRAGMA_UNROLL
          for (int k = 0; k < L::kVector; ++k) value[k] = Config::MidActivation::apply(sum[i][j][k]);
          auto const stored = convert_vector<Element>(value);
          *reinterpret_cast<cutlass::AlignedArray<Element, L::kVector>*>(y + (int64_t(i) * args.q + j) * Config::kC) = stored;
          spoiled |= !is_finite(stored);
        }
    if (!spoiled) continue;
    infinite = true;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int i = 0; i < L::kP * L::kQ * L::kVector; ++i) {
      int const row = i / L::kVector / L::kQ, column = i / L::kVector % L::kQ, k = i % L::kVector;
      if (p + row >= args.p || q + column >= args.q) continue;
      Element& value = y[(int64_t(row) * args.q + column) * Config::kC + k];
      if (float(value) == float(value)) continue;
      value = Element(Config::MidActivation::apply(depthwise_from_global<Config>(args, n, c + k, p + row, q + column)));
    }
  }
  if constexpr (!Config::kOfBlock) await_grid_before();  // the next kernel waits for this one alone
  if constexpr (Config::kFp16Range) {
    int const any = __syncthreads_or(infinite);
    if (threadIdx.x == 0) static_cast<int*>(args.workspace)[blockIdx.x] = any;
  }
}

}  // namespace cutlass_sep
