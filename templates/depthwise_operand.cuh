// The depthwise stage: the values of the pointwise GEMM's A operand, made on the fly from a tile of x in shared memory.
//
// One call makes, for one lane, the depthwise outputs of its pixels and of its channels of one MMA instruction, in fp32 registers in the
// order of the A fragment. It knows nothing of how the tile came to shared memory or of which MMA consumes it.
#pragma once

namespace cutlass_sep {

/// Depthwise weights and bias of a chunk of channels, fp32, in the order lanes read them: [step][lane column t][kernel row, then the
/// bias][tap of the row][channel of the lane], kernel rows and lane columns padded to 16-byte units.
template <class Config>
struct DepthwiseWeights {
  using G = Geometry<Config>;
  static constexpr int units(int taps) { return ceil_div(taps * G::kLaneChannels, 4); }
  static constexpr int kRowUnits = units(Config::kKernelW);
  /// 16-byte units of a lane column: odd, so that the four columns of a warp lie in different banks.
  static constexpr int kLaneUnits = (Config::kKernelH * kRowUnits + 1) | 1;
  static constexpr int kBytes = Config::kSlotChannels / G::kLaneChannels * kLaneUnits * 16;
  using Row = float[4 * kRowUnits];

  /// Index of a value in floats; `row` = kKernelH is the bias.
  CUTLASS_HOST_DEVICE static constexpr int index(int step, int t, int row, int tap, int j) {
    return ((step * 4 + t) * kLaneUnits + row * kRowUnits) * 4 + tap * G::kLaneChannels + j;
  }

  /// `threads` threads, of which this is number `thread`, write the table of one chunk, from channel `first` on.
  CUTLASS_DEVICE static void pack(Arguments const& args, char* table, int first, int thread, int threads) {
    using Element = typename Config::Element;
    for (int i = thread; i < (G::kTaps + 1) * Config::kSlotChannels; i += threads) {
      int const tap = i / Config::kSlotChannels, k = i % Config::kSlotChannels;
      int const step = k / G::kStepChannels, t = k % G::kStepChannels / G::kLaneChannels, j = k % G::kLaneChannels;
      int const c = first + step * G::kStepChannels + G::channel_of(t, j);
      float value = 0.f;
      if (c < Config::kC) {
        if (tap < G::kTaps) value = Config::kDepthwise ? float(static_cast<Element const*>(args.dw_weight)[int64_t(c) * G::kTaps + tap]) : 1.f;
        else if (Config::kDwBias) value = static_cast<Element const*>(args.dw_bias)[c];
      }
      reinterpret_cast<float*>(table)[index(step, t, tap / Config::kKernelW, tap % Config::kKernelW, j)] = value;
    }
  }

  float const* lane;  // this lane's first value of the MMA step

  CUTLASS_DEVICE DepthwiseWeights(float const* chunk, int step, int t) : lane(chunk + index(step, t, 0, 0, 0)) {}

  CUTLASS_DEVICE float const* tap(int row, int s) const { return lane + row * kRowUnits * 4 + s * G::kLaneChannels; }

  /// `Taps` taps of kernel row `row`: tap first + s of channel j is value[s * kLaneChannels + j]; first * kLaneChannels is a multiple of 4.
  template <int Taps>
  CUTLASS_DEVICE void load_taps(float (&value)[units(Taps) * 4], int row, int first) const {
    CUTLASS_PRAGMA_UNROLL
    for (int u = 0; u < units(Taps); ++u)
      *reinterpret_cast<float4*>(value + 4 * u) = *reinterpret_cast<float4 const*>(tap(row, first) + u * 4);
  }
  CUTLASS_DEVICE void load_row(Row& value, int row) const { load_taps<Config::kKernelW>(value, row, 0); }
  CUTLASS_DEVICE float4 load_bias() const { return *reinterpret_cast<float4 const*>(lane + Config::kKernelH * kRowUnits * 4); }
};

/// The lane's view of one row of a pixel-major tile: [column][128 bytes of channels], 16-byte units XOR-swizzled by column % 8 (what
/// TMA's 128-byte swizzle writes when the row starts on a multiple of 1024 bytes).
template <class Config>
struct PixelMajorRow {
  using G = Geometry<Config>;
  static constexpr int kColumnBytes = 128;
  static constexpr int kAtomSteps = kColumnBytes / (G::kStepChannels * G::kElementBytes);  // steps per 128 bytes
  static constexpr int kWindow = G::kWindowQ;

  uint32_t offset[kWindow];  // of each window column, for step 0

  /// Of lane column t's bytes for step 0 of a column.
  CUTLASS_DEVICE static uint32_t column_offset(int column, int t) {
    return column * kColumnBytes + ((((t >> 1) ^ column) & 7) << 4) + (t & 1) * 8;
  }

  CUTLASS_DEVICE PixelMajorRow(int column, int t) {
    CUTLASS_PRAGMA_UNROLL
    for (int u = 0; u < kWindow; ++u) offset[u] = column_offset(column + u, t);
  }

  static constexpr bool used(int u) {
    for (int i = 0; i < G::kLaneQ; ++i)
      for (int s = 0; s < Config::kKernelW; ++s)
        if (i * Config::kStrideW + s * Config::kDilationW == u) return true;
    return false;
  }

  /// `atom_bytes`: from one 128-byte group of channels to the next.
  CUTLASS_DEVICE void load(float (&window)[kWindow][G::kLaneChannels], char const* row, int step, int atom_bytes) const {
    char const* base = row + (step / kAtomSteps) * atom_bytes;
    uint32_t const step_bytes = step % kAtomSteps * 32;
    CUTLASS_PRAGMA_UNROLL
    for (int u = 0; u < kWindow; ++u)
      if (used(u)) load_vector<typename Config::Element>(window[u], base + (offset[u] ^ step_bytes));
  }
};

/// The lane's view of one row of a channel-major tile: [channel][kPitch columns], read in aligned vectors. The first column of the
/// tile lies Config::kPhase columns left of the first pixel's first tap.
template <class Config>
struct ChannelMajorRow {
  using G = Geometry<Config>;
  using Element = typename Config::Element;
  static constexpr int kVector = G::kLaneQ * Config::kStrideW % 4 == 0 ? 4 : 2;
  static constexpr int kFirst = Config::kPhase / kVector;  // vectors left of every tap are not read
  static constexpr int kSkip = Config::kPhase % kVector;
  static constexpr int kVectors = ceil_div(kSkip + G::kWindowQ, kVector);
  static constexpr int kWindow = kVectors * kVector;
  // Two lanes' channels must not share banks: the pitch of a channel is 32 or 96 bytes past a multiple of 128.
  static constexpr int kUnit = 16 / G::kElementBytes;
  static constexpr int pitch(int columns) {
    int const bytes = round_up(columns, kUnit) * G::kElementBytes;
    int const rest = bytes % 128;
    int const padded = rest <= 32 ? bytes + 32 - rest : rest <= 96 ? bytes + 96 - rest : bytes + 160 - rest;
    return padded / G::kElementBytes;
  }

  // Lane g's vector v is lane g + 1's vector v - 1. Where one vector of a lane covers its pixels but for a column or two on either side,
  // the columns beside it come from the neighbours by shuffle, and only the warp's outer lanes read a second vector.
  static constexpr int kOwn = kVectors / 2;
  static constexpr bool kShuffle = G::kElementBytes == 4 && G::kLaneQ == 4 && Config::kStrideW == 1 && Config::kDilationW == 1 &&
                                   kVectors == 3 && kSkip + G::kWindowQ - 8 <= 4 && kSkip >= 0;

  uint32_t offset, edge_offset;
  int pitch_elements, g;

  CUTLASS_DEVICE ChannelMajorRow(int column, int g_, int t, int pitch_) : pitch_elements(pitch_), g(g_) {
    offset = (t * pitch_ + column + kFirst * kVector) * G::kElementBytes;
    edge_offset = offset + (g == 0 ? 0 : 2 * kVector) * G::kElementBytes;
  }

  static constexpr bool used(int v) {
    for (int u = v * kVector; u < (v + 1) * kVector; ++u)
      for (int i = 0; i < G::kLaneQ; ++i)
        for (int s = 0; s < Config::kKernelW; ++s)
          if (kSkip + i * Config::kStrideW + s * Config::kDilationW == u) return true;
    return false;
  }

  CUTLASS_DEVICE void load(float (&window)[kWindow], char const* row, int step, int j) const {
    int const channel_bytes = (step * G::kStepChannels + 4 * j) * pitch_elements * G::kElementBytes;
    if constexpr (kShuffle) {
      float own[4], edge[4];
      load_vector<float>(own, row + offset + channel_bytes + kOwn * 16);
      if (g == 0 || g == 7) load_vector<float>(edge, row + edge_offset + channel_bytes);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 4; ++i) {
        window[4 + i] = own[i];
        if (i >= kSkip) {
          float const left = __shfl_up_sync(0xffffffffu, own[i], 4);
          window[i] = g == 0 ? edge[i] : left;
        }
        if (8 + i < kSkip + G::kWindowQ) {
          float const right = __shfl_down_sync(0xffffffffu, own[i], 4);
          window[8 + i] = g == 7 ? edge[i] : right;
        }
      }
      return;
    }
    char const* base = row + offset + channel_bytes;
    CUTLASS_PRAGMA_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      if (!used(v)) continue;
      float vector[kVector];
      load_vector<Element>(vector, base + v * kVector * G::kElementBytes);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kVector; ++i) window[v * kVector + i] = vector[i];
    }
  }
};

/// The A operand of one MMA step of one lane: value[b][h][j] for block b, row half h, channel j, before rounding to the MMA's type.
template <class Config>
struct DepthwiseOperand {
  using G = Geometry<Config>;
  using Value = float[Config::kBlocks][2][G::kLaneChannels];

  /// Output row p of the lane (0 .. kLaneP - 1) meets window row r in kernel row `kernel_row(r, p)`, or not at all (-1).
  static constexpr int kernel_row(int r, int p) {
    int const d = r - p * Config::kStrideH;
    return d >= 0 && d % Config::kDilationH == 0 && d / Config::kDilationH < Config::kKernelH ? d / Config::kDilationH : -1;
  }
  static constexpr bool row_used(int r) {
    for (int p = 0; p < G::kLaneP; ++p)
      if (kernel_row(r, p) >= 0) return true;
    return false;
  }

  CUTLASS_DEVICE static void start(Value& value, DepthwiseWeights<Config> const& weights) {
    float4 const bias4 = Config::kDwBias ? weights.load_bias() : make_float4(0.f, 0.f, 0.f, 0.f);
    float const bias[4] = {bias4.x, bias4.y, bias4.z, bias4.w};
    CUTLASS_PRAGMA_UNROLL
    for (int b = 0; b < Config::kBlocks; ++b)
      CUTLASS_PRAGMA_UNROLL
      for (int h = 0; h < 2; ++h)
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < G::kLaneChannels; ++j) value[b][h][j] = bias[j];
  }

  CUTLASS_DEVICE static void finish(Value& value) {
    CUTLASS_PRAGMA_UNROLL
    for (int b = 0; b < Config::kBlocks; ++b)
      CUTLASS_PRAGMA_UNROLL
      for (int h = 0; h < 2; ++h)
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < G::kLaneChannels; ++j) value[b][h][j] = Config::MidActivation::apply(value[b][h][j]);
  }

  /// Pixel-major tile; `rows(r)` is the address of window row r.
  template <class Rows>
  CUTLASS_DEVICE static void compute(Value& value, PixelMajorRow<Config> const& view, Rows const& rows,
                                     DepthwiseWeights<Config> const& weights, int step, int atom_bytes) {
    start(value, weights);
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < G::kWindowP; ++r) {
      if (!row_used(r)) continue;
      float window[PixelMajorRow<Config>::kWindow][G::kLaneChannels];
      view.load(window, rows(r), step, atom_bytes);
      CUTLASS_PRAGMA_UNROLL
      for (int p = 0; p < G::kLaneP; ++p) {
        if (kernel_row(r, p) < 0) continue;
        typename DepthwiseWeights<Config>::Row w;
        weights.load_row(w, kernel_row(r, p));
        CUTLASS_PRAGMA_UNROLL
        for (int s = 0; s < Config::kKernelW; ++s) {
          CUTLASS_PRAGMA_UNROLL
          for (int h = 0; h < 2; ++h)
            CUTLASS_PRAGMA_UNROLL
            for (int j = 0; j < G::kLaneChannels; ++j)
              value[p][h][j] = fmaf(w[s * G::kLaneChannels + j], window[h * Config::kStrideW + s * Config::kDilationW][j], value[p][h][j]);
        }
      }
    }
    finish(value);
  }

  /// Channel-major tile.
  template <class Rows>
  CUTLASS_DEVICE static void compute(Value& value, ChannelMajorRow<Config> const& view, Rows const& rows,
                                     DepthwiseWeights<Config> const& weights, int step, int) {
    using Row = ChannelMajorRow<Config>;
    start(value, weights);
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < G::kWindowP; ++r) {
      if (!row_used(r)) continue;
      typename DepthwiseWeights<Config>::Row w;
      weights.load_row(w, kernel_row(r, 0));
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < G::kLaneChannels; ++j) {
        float window[Row::kWindow];
        view.load(window, rows(r), step, j);
        CUTLASS_PRAGMA_UNROLL
        for (int s = 0; s < Config::kKernelW; ++s) {
          CUTLASS_PRAGMA_UNROLL
          for (int b = 0; b < Config::kBlocks; ++b)
            CUTLASS_PRAGMA_UNROLL
            for (int h = 0; h < 2; ++h)
              value[b][h][j] = fmaf(w[s * G::kLaneChannels + j], window[Row::kSkip + (2 * b + h) * Config::kStrideW + s * Config::kDilationW],
                                    value[b][h][j]);
        }
      }
    }
    finish(value);
  }
};

/// Powers of two that bring a lane's pixels into fp16's range, for the fp32-grade form; nothing else uses them. A pixel is a row of the GEMM, so
/// its scale leaves the sum as it came in. It is set at the first value other than 0, to bring the largest of those 16 channels into [1, 2):
/// 2^15 of room above; below, the low part keeps 2^-25 of that value.
template <class Config>
struct PixelScale {
  using G = Geometry<Config>;
  float scale[Config::kBlocks][2] = {};  // 0: not set

  CUTLASS_DEVICE float inverse(int b, int h) const {
    return scale[b][h] == 0.f ? 0.f : inverse_power(scale[b][h]);
  }

  /// To be called by the whole warp, for every block of kMmaSteps steps. `check` turns NaN at values so large or so small that products of
  /// scales could leave fp32's range.
  CUTLASS_DEVICE void update(typename DepthwiseOperand<Config>::Value const (&value)[Config::kMmaSteps], float& check) {
    bool unset = false;
    CUTLASS_PRAGMA_UNROLL
    for (int b = 0; b < Config::kBlocks; ++b) unset |= scale[b][0] == 0.f || scale[b][1] == 0.f;
    if (!__any_sync(0xffffffffu, unset)) return;
    CUTLASS_PRAGMA_UNROLL
    for (int b = 0; b < Config::kBlocks; ++b)
      CUTLASS_PRAGMA_UNROLL
      for (int h = 0; h < 2; ++h) {
        float largest = 0.f;
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < Config::kMmaSteps; ++i)
          CUTLASS_PRAGMA_UNROLL
          for (int j = 0; j < G::kLaneChannels; ++j) largest = fmaxf(largest, fabsf(value[i][b][h][j]));
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
        if (scale[b][h] == 0.f && largest > 0.f) {
          scale[b][h] = inverse_power(largest);
          if (!in_scaled_range(largest)) check = __int_as_float(0x7fffffff);
        }
      }
  }

  CUTLASS_DEVICE static bool in_scaled_range(float x) { return x > 0x1p-100f && x < 0x1p+100f; }
};

/// The A fragments of one MMA instruction as the tensor core takes them: one part, or for the fp32-grade form two fp16 parts of the scaled value,
/// whose sum has 22 bits.
template <class Config>
struct OperandFragment {
  using G = Geometry<Config>;
  static constexpr int kParts = Config::kSplit ? 2 : 1;
  uint32_t a[kParts][Config::kBlocks][4];

  /// Rounds the kInstructionSteps values at `value`. `check` turns NaN if one does not survive (Inf, NaN, beyond fp16's range), so that the tile
  /// can be computed again in plain fp32; single-part TF32 and bf16 have fp32's range and need no check, unless they come from MMAs.
  CUTLASS_DEVICE void assign(typename DepthwiseOperand<Config>::Value const* value, PixelScale<Config> const& scale, float& check) {
    __half2 const zero = __float2half2_rn(0.f);
    __half2 survived = zero;
    constexpr bool kCheck16 = G::kElementBytes == 2 && (Config::kFp16Range || G::kTensorDepthwise);
    uint32_t survived16 = 0;
    CUTLASS_PRAGMA_UNROLL
    for (int b = 0; b < Config::kBlocks; ++b)
      CUTLASS_PRAGMA_UNROLL
      for (int h = 0; h < 2; ++h)
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < 2; ++j) {
          int const i = 2 * j + h;
          if constexpr (Config::kSplit) {
            float const low = value[j][b][h][0] * scale.scale[b][h], high = value[j][b][h][1] * scale.scale[b][h];
            __half2 const hi = __floats2half2_rn(low, high);
            __half2 const lo = __floats2half2_rn(low - __low2float(hi), high - __high2float(hi));
            survived = __hfma2(lo, zero, survived);
            a[0][b][i] = reinterpret_cast<uint32_t const&>(hi);
            a[kParts - 1][b][i] = reinterpret_cast<uint32_t const&>(lo);
          } else if constexpr (G::kElementBytes == 4) {
            a[0][b][i] = tf32_operand(value[0][b][h][j]);
          } else {
            a[0][b][i] = pack_pair<typename Config::Element>(value[0][b][h][2 * j], value[0][b][h][2 * j + 1]);
            if constexpr (kCheck16) survived16 = add_vanished<typename Config::Element>(a[0][b][i], survived16);
          }
        }
    if constexpr (Config::kSplit) check += __low2float(survived) + __high2float(survived);
    if constexpr (kCheck16) {
      float pair[2];
      load_vector<typename Config::Element>(pair, &survived16);
      check += pair[0] + pair[1];
    }
  }
};

/// The products of the split form, smallest first: (part of A, part of B). Left out is lo x lo, 2^-22 of the result.
struct SplitProducts {
  static constexpr int kCount = 3;
  CUTLASS_HOST_DEVICE static constexpr int a(int i) { return i == 0; }
  CUTLASS_HOST_DEVICE static constexpr int b(int i) { return i == 1; }
};

}  // namespace cutlass_sep
