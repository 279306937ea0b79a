// A 1-D depthwise convolution on the tensor cores: mma.sync with a Toeplitz matrix of the taps, for 16-bit values in rows of positions.
//
// One channel, 128 outputs: A[m][k] = e[8m + k] (row m of the MMA is a block of 8 outputs, and its 16 columns overlap the next row's), B[k][n]
// = tap[k - n], so that D[m][n] is output 8m + n. A comes by ldmatrix straight from the row; where the taps reach further than 16 positions,
// more MMAs follow, 16 positions on. A value that is not finite spoils the 8 outputs of its block, not only those that it belongs to.
#pragma once

namespace cutlass_sep {

/// A row of positions of each of 64 channels: [64 positions][channel][128 bytes], 16-byte units XOR-swizzled by channel % 8 as wgmma reads an
/// MN-major operand; behind position 127, 8 positions at a time, [channel][16 bytes].
template <class Config>
struct PositionRows {
  static constexpr int kBlockBytes = 64 * 128;
  static constexpr int kTailBytes = 64 * 16;
  /// Taps start this many positions into a row.
  static constexpr int kFirstTap = Config::kPhase % 2;
  /// A row starts this many positions into the window. Within 16 bytes, position p of a unit is the (p + kShift) % 8-th.
  static constexpr int kShift = Config::kPhase / 2 * 2;
  static_assert(kShift < 8);
  static constexpr int kReach = kFirstTap + (Config::kKernelW - 1) * Config::kDilationW + 1;
  static constexpr int kMmas = ceil_div(kReach + 7, 16);
  static constexpr int kTails = 2 * kMmas - 1;
  static constexpr int kBytes = 2 * kBlockBytes + kTails * kTailBytes;

  /// Byte of 8 positions from 8 * `unit` on.
  CUTLASS_HOST_DEVICE static constexpr int offset(int channel, int unit) {
    return unit < 16 ? unit / 8 * kBlockBytes + channel * 128 + ((unit ^ channel) % 8 << 4)
                     : 2 * kBlockBytes + (unit - 16) * kTailBytes + channel * 16;
  }
};

/// The taps of 64 channels as lanes read them: [4 channels together][word][4 channels]. A word is a pair of entries of B; one more is zero,
/// one the bias in fp32; if they are scaled (half_operands.cuh), one the inverse scale.
template <class Config>
struct ToeplitzTaps {
  using R = PositionRows<Config>;
  /// Word e + 1 holds entries e and e + 1 of the taps as they lie in a row, for e = -1 .. kReach - 1.
  static constexpr int kZeroWord = R::kReach + 1, kBiasWord = R::kReach + 2, kScaleWord = R::kReach + 3;
  static constexpr int kWords = R::kReach + 3 + Config::kScaled;
  static constexpr int kBytes = 16 * kWords * 16;  // of 64 channels

  CUTLASS_HOST_DEVICE static constexpr int word_of(int entry) { return entry >= -1 && entry < R::kReach ? entry + 1 : kZeroWord; }
  CUTLASS_HOST_DEVICE static constexpr int offset(int channel, int word) { return (channel / 4 * kWords + word) * 16 + channel % 4 * 4; }

  /// Threads of a block write the table of one chunk of 64 channels, from channel `first` on.
  CUTLASS_DEVICE static void pack(Arguments const& args, char* table, int first) {
    using Element = typename Config::Element;
    auto const* weight = static_cast<Element const*>(args.dw_weight);
    for (int i = threadIdx.x; i < 64 * kWords; i += kPackThreads) {
      int const channel = i % 64, word = i / 64, c = first + channel;
      float value[2] = {}, scale = 1.f;
      if constexpr (Config::kScaled) {
        float largest = 0.f;
        for (int s = 0; s < Config::kKernelW && c < Config::kC; ++s) largest = fmaxf(largest, fabsf(float(weight[int64_t(c) * Config::kKernelW + s])));
        scale = half_scale(largest);
      }
      if (c < Config::kC && word < kZeroWord) {
        CUTLASS_PRAGMA_UNROLL
        for (int k = 0; k < 2; ++k) {
          int const position = word - 1 + k - R::kFirstTap;
          if (position >= 0 && position % Config::kDilationW == 0 && position / Config::kDilationW < Config::kKernelW)
            value[k] = float(weight[int64_t(c) * Config::kKernelW + position / Config::kDilationW]) * scale;
        }
      }
      float const bias = Config::kDwBias && c < Config::kC ? float(static_cast<Element const*>(args.dw_bias)[c]) : 0.f;
      uint32_t& target = *reinterpret_cast<uint32_t*>(table + offset(channel, word));
      if (word == kBiasWord) target = __float_as_uint(bias);
      else if (Config::kScaled && word == kScaleWord) target = __float_as_uint(inverse_power(scale));
      else target = pack_pair<typename Config::Operand>(value[0], value[1]);
    }
  }
};

/// A warp's 8 channels at a time, 128 outputs each. Lane: outputs 8 (g + 8h) + 2t + i of channel k are value[k][2h + i].
template <class Config>
struct ToeplitzDepthwise {
  using R = PositionRows<Config>;
  using T = ToeplitzTaps<Config>;
  using Value = float[8][4];

  int bias, scale, taps[R::kMmas][2];  // bytes into the table
  // Of the lane's row of the four 8 x 8 matrices of each MMA's A: its byte for the first channel, how far channels lie apart, what swizzles.
  int row[R::kMmas], pitch[R::kMmas], swizzle[R::kMmas];

  /// `channel`: the warp's first, a multiple of 8.
  CUTLASS_DEVICE ToeplitzDepthwise(int channel, int lane)
      : bias(T::offset(channel, T::kBiasWord)), scale(T::offset(channel, T::kScaleWord)) {
    int const g = lane / 4, t = lane % 4;
    CUTLASS_PRAGMA_UNROLL
    for (int m = 0; m < R::kMmas; ++m) {
      CUTLASS_PRAGMA_UNROLL
      for (int h = 0; h < 2; ++h) taps[m][h] = T::offset(channel, T::word_of(16 * m + 8 * h + (2 * t + 8 - R::kShift) % 8 - g));
      int const unit = lane % 8 + lane / 8 % 2 * 8 + lane / 16 + 2 * m;
      bool const tail = unit >= 16;
      row[m] = R::offset(channel, unit);
      pitch[m] = tail ? 16 : 128;
      swizzle[m] = tail ? 0 : 0x70;
    }
  }

  /// Of the warp's channels [first, first + 8). `known`: of the warp's channels, if they are scaled.
  CUTLASS_DEVICE void compute(Value& value, int first, char const* rows, char const* table, HiddenChannel const* known) const {
    using Atom = typename Config::DepthwiseAtom;
    CUTLASS_PRAGMA_UNROLL
    for (int four = 0; four < 8; four += 4) {
      char const* const group = table + (first + four) / 4 * T::kWords * 16;
      float start[4];
      load_vector<float>(start, group + bias);
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < 4; ++k)
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 4; ++i) value[four + k][i] = Config::kScaled ? 0.f : start[k];
      CUTLASS_PRAGMA_UNROLL
      for (int m = 0; m < R::kMmas; ++m) {
        uint4 const low = *reinterpret_cast<uint4 const*>(group + taps[m][0]), high = *reinterpret_cast<uint4 const*>(group + taps[m][1]);
        uint32_t const b[4][2] = {{low.x, high.x}, {low.y, high.y}, {low.z, high.z}, {low.w, high.w}};
        CUTLASS_PRAGMA_UNROLL
        for (int k = 0; k < 4; ++k) {
          int const channel = first + four + k;
          char const* const address = rows + channel * pitch[m] + (row[m] ^ (channel << 4 & swizzle[m]));
          uint32_t a[4];
          cute::SM75_U32x4_LDSM_N::copy(*reinterpret_cast<cute::uint128_t const*>(address), a[0], a[1], a[2], a[3]);
          float(&d)[4] = value[four + k];
          Atom::fma(d[0], d[1], d[2], d[3], a[0], a[1], a[2], a[3], b[k][0], b[k][1], d[0], d[1], d[2], d[3]);
        }
      }
      if constexpr (Config::kScaled) {
        float unit[4];
        load_vector<float>(unit, group + scale);
        CUTLASS_PRAGMA_UNROLL
        for (int k = 0; k < 4; ++k)
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < 4; ++i) value[four + k][i] = fmaf(value[four + k][i], unit[k] * known[first + four + k].inverse_scale, start[k]);
      }
    }
  }
};

}  // namespace cutlass_sep
