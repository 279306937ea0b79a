// The depthwise stage on the tensor cores: mma.sync with diagonal matrices of taps, for 16-bit values in pixel-major tiles.
//
// One MMA: 16 pixels, 8 channels, two taps. A[m][k] is channel k % 8 of x under tap k / 8 of pixel m, as ldmatrix reads it; B[k][n] is that tap's
// weight of channel k % 8 in the column of that channel, and zero elsewhere. Sums are fp32 and leave in the order of the A fragment of the
// pointwise MMA. A matrix of 8 pixels and 8 channels serves every tap and pixel that needs it. Zero times a value that is not finite is NaN:
// such a value spoils 8 channels of its pixels, and OperandFragment's check finds them.
//
// Channels are taken 32 at a time, in 4 groups of 8. A group's diagonal is on 8 lanes, to each of which 4 bytes bring two taps of its channel; the
// other lanes read the same bytes and make zeros of them.
#pragma once

namespace cutlass_sep {

/// Depthwise weights and bias of a chunk of channels. Table: of each 32 channels [pair of taps][channel] two 16-bit taps; then in fp32 the biases of
/// the 8 channels whose sums the lanes of a column have, [lane % 4][group of 8 channels][2]. A launch before makes it, or warps of the main kernel:
/// then behind the table lies what it is made from, taps and biases of the chunk as the tensors have them.
template <class Config>
struct DiagonalTaps {
  using Element = typename Config::Element;
  static constexpr int kTaps = Config::kKernelH * Config::kKernelW;
  static constexpr int kPairs = Config::kDepthwise ? ceil_div(kTaps, 2) : 0;
  static constexpr int kGroups = Config::kSlotChannels / 32;
  static constexpr int kGroupBytes = Config::kDepthwise ? (kPairs + 1) * 128 : 0;
  static constexpr int kTableBytes = kGroups * kGroupBytes;
  static constexpr bool kRaw = Config::kDepthwise && !Config::kPacksTaps;
  static constexpr int kRawTapsBytes = kRaw ? Config::kSlotChannels * kTaps * 2 : 0;
  static constexpr int kRawBiasBytes = kRaw && Config::kDwBias ? Config::kSlotChannels * 2 : 0;
  static constexpr int kBytes = kTableBytes + kRawTapsBytes + kRawBiasBytes;

  /// Warp `warp` of `Warps` makes its part of the table from taps [channel][tap] and biases of `channels` channels: rows of 32 words, some at a time,
  /// since each is a chain of latencies.
  template <int Warps>
  CUTLASS_DEVICE static void fill(char* table, Element const* taps, Element const* bias, int channels, int warp, int lane) {
    auto const* const bits = reinterpret_cast<uint16_t const*>(taps);
    auto* const words = reinterpret_cast<uint32_t*>(table) + lane;
    constexpr int kRows = kGroups * kPairs, kBatch = cute::min(ceil_div(kRows, Warps), 5);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int start = warp; start < kRows; start += kBatch * Warps) {
      uint32_t word[kBatch];
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < kBatch; ++k) {
        int const row = min(start + k * Warps, kRows - 1), pair = row % kPairs, c = row / kPairs * 32 + lane;
        uint16_t const* const own = bits + min(c, channels - 1) * kTaps + 2 * pair;
        word[k] = own[0] | (2 * pair + 1 < kTaps ? uint32_t(own[1]) << 16 : 0);
        if (c >= channels) word[k] = 0;
      }
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < kBatch; ++k) {
        int const row = min(start + k * Warps, kRows - 1);
        words[(row + row / kPairs) * 32] = word[k];
      }
    }
    if constexpr (Config::kDwBias) {
      for (int group = warp; group < kGroups; group += Warps) {
        int const c = group * 32 + lane % 8 / 2 * 8 + lane / 8 * 2 + lane % 2;
        words[(group * (kPairs + 1) + kPairs) * 32] = c < channels ? __float_as_uint(float(bias[c])) : 0;
      }
    }
  }
};

/// The 8 x 8 matrices of x that a warp's depthwise outputs need, in the order in which they are loaded: by row, then column of the window. In a run
/// each half of a block starts somewhere by itself, and no matrix serves two taps: they are in the order of the taps.
template <class Config>
struct PixelMatrices {
  using G = Geometry<Config>;
  static constexpr int kTaps = Config::kKernelH * Config::kKernelW;
  static constexpr int kMost = kTaps * 2 * Config::kBlocks;

  int count = 0;
  int row[kMost] = {}, column[kMost] = {};  // of a matrix's first pixel, from the warp's first (in a run, from its half's)
  int half[kMost] = {};                     // in a run: of the block
  int of[kTaps][Config::kBlocks][2] = {};   // tap, block, half of the block: its matrix
  int ready[kTaps] = {};                    // the last matrix that a tap needs

  CUTLASS_HOST_DEVICE static constexpr int row_of(int tap, int b, int h) {
    return G::pixel_p(b, h) * Config::kStrideH + tap / Config::kKernelW * Config::kDilationH;
  }
  CUTLASS_HOST_DEVICE static constexpr int column_of(int tap, int h) {
    return G::pixel_q(0, h) * Config::kStrideW + tap % Config::kKernelW * Config::kDilationW;
  }
  /// Where (r, c) lies among those that are there, or should.
  CUTLASS_HOST_DEVICE constexpr int find(int r, int c) const {
    int i = count;
    while (i > 0 && (row[i - 1] > r || (row[i - 1] == r && column[i - 1] >= c))) --i;
    return i;
  }
  CUTLASS_HOST_DEVICE constexpr PixelMatrices() {
    if (G::kRuns) {
      for (int tap = 0; tap < kTaps; ++tap)
        for (int h = 0; h < 2; ++h, ++count) {
          row[count] = row_of(tap, 0, 0), column[count] = column_of(tap, 0), half[count] = h;
          of[tap][0][h] = ready[tap] = count;
        }
      return;
    }
    for (int tap = 0; tap < kTaps; ++tap)
      for (int b = 0; b < Config::kBlocks; ++b)
        for (int h = 0; h < 2; ++h) {
          int const r = row_of(tap, b, h), c = column_of(tap, h), at = find(r, c);
          if (at < count && row[at] == r && column[at] == c) continue;
          for (int i = count; i > at; --i) row[i] = row[i - 1], column[i] = column[i - 1];
          row[at] = r, column[at] = c;
          ++count;
        }
    for (int tap = 0; tap < kTaps; ++tap)
      for (int b = 0; b < Config::kBlocks; ++b)
        for (int h = 0; h < 2; ++h) {
          of[tap][b][h] = find(row_of(tap, b, h), column_of(tap, h));
          if (of[tap][b][h] > ready[tap]) ready[tap] = of[tap][b][h];
        }
  }
};

/// The operand's values of one warp, 32 channels at a time, from rows of a pixel-major tile. For ldmatrix a lane addresses pixel lane % 8 of a
/// matrix and group lane / 8 of 8 channels.
template <class Config>
struct DiagonalDepthwise {
  using G = Geometry<Config>;
  using T = DiagonalTaps<Config>;
  using Value = typename DepthwiseOperand<Config>::Value;
  static constexpr PixelMatrices<Config> kMatrices{};
  static constexpr int kCount = kMatrices.count;
  static constexpr int kAhead = 2;  // matrices that are loaded before they are needed
  using Matrix = uint32_t[4];  // of 4 groups of channels

  /// Bytes by column % 8, which is what TMA's swizzle depends on. `pixel` is the lane's, in columns from where rows begin. In a run each half of
  /// the block has its own.
  uint32_t offset[G::kRuns ? 2 : 1][8];
  uint32_t selector[2];  // brings one of the two taps of a word to where the diagonal meets the lane; zeros to lanes that it does not meet
  int t;

  /// `pixel`: the warp's first; of runs, follow() says where the lanes' are.
  CUTLASS_DEVICE DiagonalDepthwise(int pixel, int lane) : t(lane % 4) {
    int const g = lane / 4;
    place(0, pixel + lane % 8 * Config::kStrideW, lane);
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < 2; ++k) {
      uint32_t const bytes = k == 0 ? 0x10u : 0x32u;  // of the word; byte 4 is zero
      selector[k] = g / 2 != t ? 0x4444u : g % 2 == 0 ? 0x4400u | bytes : bytes << 8 | 0x44u;
    }
  }

  CUTLASS_DEVICE void place(int half, int own, int lane) {
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < 8; ++k) offset[half][k] = own * 128 + ((lane / 8 ^ (own + k)) & 7) * 16;
  }

  /// The block's pixels are those of the map from `first` on, in a window that starts with row `window_p` of the map and whose rows have a multiple
  /// of 8 columns. Those behind the map's end stay at its last pixel.
  CUTLASS_DEVICE void follow(Arguments const& args, int first, int window_p, int pitch, int lane) {
    CUTLASS_PRAGMA_UNROLL
    for (int half = 0; half < 2; ++half) {
      int const pixel = min(first + 8 * half + lane % 8, args.p * args.q - 1), p = pixel / args.q;
      place(half, (p - window_p) * Config::kStrideH * pitch + (pixel - p * args.q) * Config::kStrideW, lane);
    }
  }

  /// `rows(r)`: address of window row r; `rows.phase(r)`: columns by which its swizzle is turned. `group`: of 32 channels in the chunk.
  template <class Rows>
  CUTLASS_DEVICE void load(Matrix& matrix, int half, int row, int column, Rows const& rows, int group) const {
    uint32_t const lane_bytes = offset[half][(rows.phase(row) + column) % 8] ^ uint32_t(group % 2 * 64);
    char const* const address = rows(row) + group / 2 * Rows::kAtomBytes + lane_bytes + column * 128;
    cute::SM75_U32x4_LDSM_N::copy(*reinterpret_cast<cute::uint128_t const*>(address), matrix[0], matrix[1], matrix[2], matrix[3]);
  }

  template <int Pair, class Rows>
  CUTLASS_DEVICE void accumulate(float (&sum)[Config::kBlocks][4][4], Matrix (&matrix)[kCount], Rows const& rows, int group,
                                 uint32_t const* taps) const {
    constexpr int kTap = 2 * Pair;
    constexpr bool kTwo = kTap + 1 < T::kTaps;
    constexpr int kSecond = kTwo ? kTap + 1 : kTap;
    constexpr int kFrom = Pair == 0 ? 0 : cute::min(kMatrices.ready[kTap - (Pair > 0)] + kAhead + 1, kCount);
    constexpr int kTo = cute::min(kMatrices.ready[kSecond] + kAhead + 1, kCount);
    CUTLASS_PRAGMA_UNROLL
    for (int i = kFrom; i < kTo; ++i) load(matrix[i], kMatrices.half[i], kMatrices.row[i], kMatrices.column[i], rows, group);
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < 4; ++j) {
      uint32_t const b0 = __byte_perm(taps[Pair * 32 + j * 8], 0, selector[0]);
      CUTLASS_PRAGMA_UNROLL
      for (int b = 0; b < Config::kBlocks; ++b) {
        float(&d)[4] = sum[b][j];
        uint32_t const a0 = matrix[kMatrices.of[kTap][b][0]][j], a1 = matrix[kMatrices.of[kTap][b][1]][j];
        if constexpr (kTwo) {
          uint32_t const b1 = __byte_perm(taps[Pair * 32 + j * 8], 0, selector[1]);
          uint32_t const a2 = matrix[kMatrices.of[kSecond][b][0]][j], a3 = matrix[kMatrices.of[kSecond][b][1]][j];
          Config::DepthwiseAtom::fma(d[0], d[1], d[2], d[3], a0, a1, a2, a3, b0, b1, d[0], d[1], d[2], d[3]);
        } else {
          Config::DepthwiseTailAtom::fma(d[0], d[1], d[2], d[3], a0, a1, b0, d[0], d[1], d[2], d[3]);
        }
      }
    }
  }

  template <class Rows, int... Pair>
  CUTLASS_DEVICE void accumulate_all(float (&sum)[Config::kBlocks][4][4], Rows const& rows, int group, uint32_t const* taps,
                                     cute::integer_sequence<int, Pair...>) const {
    Matrix matrix[kCount];
    (accumulate<Pair>(sum, matrix, rows, group, taps), ...);
  }

  /// Values of 32 channels, after the mid activation. `table`: the chunk's DiagonalTaps.
  template <class Rows>
  CUTLASS_DEVICE void compute(Value (&value)[2], Rows const& rows, char const* table, int group, int lane) const {
    char const* const own = table + group * T::kGroupBytes;
    float sum[Config::kBlocks][4][4];
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < 4; ++j) {
      float2 bias = make_float2(0.f, 0.f);
      if constexpr (Config::kDwBias) bias = *reinterpret_cast<float2 const*>(own + T::kPairs * 128 + t * 32 + j * 8);
      CUTLASS_PRAGMA_UNROLL
      for (int b = 0; b < Config::kBlocks; ++b) sum[b][j][0] = sum[b][j][2] = bias.x, sum[b][j][1] = sum[b][j][3] = bias.y;
    }
    accumulate_all(sum, rows, group, reinterpret_cast<uint32_t const*>(own) + lane / 4, cute::make_int_sequence<T::kPairs>{});
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < 4; ++j)
      CUTLASS_PRAGMA_UNROLL
      for (int b = 0; b < Config::kBlocks; ++b)
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 4; ++i) value[j / 2][b][i / 2][j % 2 * 2 + i % 2] = Config::MidActivation::apply(sum[b][j][i]);
  }

  /// Without a depthwise convolution the matrices are the fragments.
  template <class Rows>
  CUTLASS_DEVICE void read(OperandFragment<Config> (&fragment)[2], Rows const& rows, int group) const {
    CUTLASS_PRAGMA_UNROLL
    for (int b = 0; b < Config::kBlocks; ++b)
      CUTLASS_PRAGMA_UNROLL
      for (int h = 0; h < 2; ++h) {
        Matrix matrix;
        load(matrix, 0, PixelMatrices<Config>::row_of(0, b, h), PixelMatrices<Config>::column_of(0, h), rows, group);
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < 4; ++j) fragment[j / 2].a[0][b][j % 2 * 2 + h] = matrix[j];
      }
  }
};

}  // namespace cutlass_sep
