// The separable operator on mma.sync, for sm_80 and newer and for every problem.
//
// A block makes a tile of pixels for a tile of output channels. For each chunk of channels it brings the window of x under its pixels to
// shared memory, pixel-major whatever the layout of x in global memory, with predicated loads whose zeros are the padding, and the packed
// weights beside it. Every warp makes the depthwise outputs of its own pixels in registers, as the A fragments of the pointwise GEMM.
// When no window fits (`kGather`), the depthwise outputs are gathered tap by tap from global memory instead.
#pragma once

namespace cutlass_sep {

template <class Config>
struct PortableLayout {
  using G = Geometry<Config>;
  using P = PackedWeights<Config>;
  static constexpr int kWarps = 4 * Config::kWarpgroups;
  static constexpr int kThreads = 32 * kWarps;
  /// Pixels of a block and the window of x under them.
  static constexpr int kTileQ = Config::kWarpsQ * G::kWarpQ;
  static constexpr int kTileP = kWarps / Config::kWarpsQ * G::kWarpP;
  static constexpr int kRows = G::window_rows(kTileP);
  static constexpr int kColumns = G::window_cols(kTileQ);
  /// Shared memory: weights of a chunk, then x as [128-byte group of channels][row][column][128 bytes, swizzled as PixelMajorRow reads them].
  static constexpr int kRowBytes = kColumns * 128;
  static constexpr int kAtomChannels = 128 / G::kElementBytes;
  static constexpr int kAtomBytes = kRows * kRowBytes;
  static constexpr int kWeightBytes = P::kPointwiseBytes + (Config::kDwShared ? DepthwiseWeights<Config>::kBytes : 0);
  static constexpr int kTileOffset = kWeightBytes + (Config::kGather ? 0 : Config::kSlotChannels / kAtomChannels * kAtomBytes);
  static constexpr int kSharedBytes = kTileOffset + 16;  // PortableTile
  /// Channels of a chunk that the MMA steps touch.
  static constexpr int kGroupChannels = Config::kMmaSteps * G::kStepChannels;
  static constexpr int kUsedChannels = cute::min(Config::kSlotChannels, round_up(Config::kC, kGroupChannels));

  /// Byte of channel `c` (of the chunk; the first of an aligned 16 bytes or less) of a pixel of the window.
  CUTLASS_DEVICE static int offset(int row, int column, int c) {
    int const byte = c % kAtomChannels * G::kElementBytes;
    return c / kAtomChannels * kAtomBytes + row * kRowBytes + column * 128 + (((byte >> 4) ^ (column & 7)) << 4) + (byte & 15);
  }
};

/// What a block computes. It lies in shared memory, so that it takes no registers while the block accumulates.
template <class Config>
struct alignas(16) PortableTile {
  using L = PortableLayout<Config>;
  int n, p, q, oc_tile;  // image, first output row and column, tile of output channels

  CUTLASS_DEVICE static int64_t count(Arguments const& args) {
    return int64_t(args.n) * ceil_div(args.p, L::kTileP) * ceil_div(args.q, L::kTileQ) * L::G::kOcTiles;
  }
  CUTLASS_DEVICE PortableTile(Arguments const& args, int64_t index) {
    int const strips = ceil_div(args.q, L::kTileQ), blocks = ceil_div(args.p, L::kTileP);
    oc_tile = index % L::G::kOcTiles;
    index /= L::G::kOcTiles;
    q = index % strips * L::kTileQ;
    index /= strips;
    p = index % blocks * L::kTileP;
    n = index / blocks;
  }
};

/// Brings the window of x whose first pixel is (h, w) and whose first channel is `c` to `tile`; zeros outside the image and past C. The
/// copies may be asynchronous (cp.async).
template <class Config>
struct WindowLoader {
  using G = Geometry<Config>;
  using L = PortableLayout<Config>;
  using Element = typename Config::Element;
  using Unit = cute::uint128_t;
  static constexpr int kUnitChannels = 16 / G::kElementBytes;  // also columns of a unit along a contiguous row

  CUTLASS_DEVICE static void load(Arguments const& args, char* tile, int n, int c, int h, int w) {
    if constexpr (Config::kVectorAccess && Config::kChannelsLast) units_of_channels(args, tile, n, c, h, w);
    else if constexpr (Config::kVectorAccess) units_of_columns(args, tile, n, c, h, w);
    else if constexpr (Config::kChannelsLast) elements_of_channels(args, tile, n, c, h, w);
    else elements_of_columns(args, tile, n, c, h, w);
  }

  /// channels_last: 16 bytes at a time.
  CUTLASS_DEVICE static void units_of_channels(Arguments const& args, char* tile, int n, int c, int h, int w) {
    constexpr int kUnits = L::kUsedChannels / kUnitChannels;
    auto const* x = static_cast<Element const*>(args.x);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int i = threadIdx.x; i < L::kRows * L::kColumns * kUnits; i += L::kThreads) {
      int const channel = i % kUnits * kUnitChannels, column = i / kUnits % L::kColumns, row = i / (kUnits * L::kColumns);
      bool const inside =
          unsigned(h + row) < unsigned(args.h) && unsigned(w + column) < unsigned(args.w) && c + channel < Config::kC;
      Element const* source = x + (inside ? GlobalIndex<Config>::x(args, n, c + channel, h + row, w + column) : 0);
      cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<Unit>::copy(*reinterpret_cast<Unit const*>(source),
                                                        *reinterpret_cast<Unit*>(tile + L::offset(row, column, channel)), inside);
    }
  }

  /// contiguous: a thread reads 16 bytes of a row from each of a unit's channels, transposes them in registers and writes 16 bytes of
  /// channels of each column. The threads of a quarter warp take units and columns so that they write to different banks.
  CUTLASS_DEVICE static void units_of_columns(Arguments const& args, char* tile, int n, int c, int h, int w) {
    constexpr int kUnits = L::kUsedChannels / kUnitChannels;
    constexpr int kVectors = (L::kColumns + 2 * kUnitChannels - 2) / kUnitChannels;  // wherever the first column lies in its vector
    constexpr int kInnerVectors = G::kElementBytes == 4 ? 2 : 1;
    constexpr int kInnerUnits = cute::min(8 / kInnerVectors, kUnits);
    constexpr int kOuterVectors = ceil_div(kVectors, kInnerVectors), kOuterUnits = ceil_div(kUnits, kInnerUnits);
    constexpr int kItems = kInnerVectors * kInnerUnits * kOuterVectors * kOuterUnits * L::kRows;
    auto const* x = static_cast<Element const*>(args.x);
    int const shift = w & (kUnitChannels - 1);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int i = threadIdx.x; i < kItems; i += L::kThreads) {
      int rest = i;
      int vector = rest % kInnerVectors;
      rest /= kInnerVectors;
      int unit = rest % kInnerUnits;
      rest /= kInnerUnits;
      vector += rest % kOuterVectors * kInnerVectors;
      rest /= kOuterVectors;
      unit += rest % kOuterUnits * kInnerUnits;
      int const row = rest / kOuterUnits;
      if (unit >= kUnits) continue;
      int const first = w - shift + vector * kUnitChannels, channel = c + unit * kUnitChannels;
      bool const inside = unsigned(h + row) < unsigned(args.h) && unsigned(first) < unsigned(args.w) &&
                          vector * kUnitChannels - shift < L::kColumns;
      Element const* source = x + (inside ? GlobalIndex<Config>::x(args, n, channel, h + row, first) : 0);
      int64_t const plane = int64_t(args.h) * args.w;
      uint32_t raw[kUnitChannels][4];
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < kUnitChannels; ++k) {
        uint4 const four =
            inside && channel + k < Config::kC ? *reinterpret_cast<uint4 const*>(source + k * plane) : make_uint4(0, 0, 0, 0);
        raw[k][0] = four.x, raw[k][1] = four.y, raw[k][2] = four.z, raw[k][3] = four.w;
      }
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < kUnitChannels; ++k) {
        int const column = vector * kUnitChannels - shift + k;
        if (unsigned(column) >= unsigned(L::kColumns)) continue;
        uint32_t word[4];
        CUTLASS_PRAGMA_UNROLL
        for (int m = 0; m < 4; ++m) {
          if constexpr (G::kElementBytes == 4) word[m] = raw[m][k];
          else word[m] = __byte_perm(raw[2 * m][k / 2], raw[2 * m + 1][k / 2], k % 2 ? 0x7632 : 0x5410);
        }
        *reinterpret_cast<uint4*>(tile + L::offset(row, column, unit * kUnitChannels)) = make_uint4(word[0], word[1], word[2], word[3]);
      }
    }
  }

  // Any alignment: element by element, 4 bytes of channels to shared memory at a time, lanes along the contiguous dimension of x.
  using Bits = cute::conditional_t<G::kElementBytes == 4, uint32_t, uint16_t>;
  static constexpr int kWordChannels = 4 / G::kElementBytes;
  static constexpr int kWords = L::kUsedChannels / kWordChannels;
  static constexpr int kInFlight = 16 / kWordChannels;  // words of a thread on their way at a time

  /// Channels [c, c + kWordChannels) that lie `stride` apart; zero where not `inside` or past C.
  CUTLASS_DEVICE static uint32_t load_word(Bits const* source, int64_t stride, int c, bool inside) {
    uint32_t word = 0;
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < kWordChannels; ++k)
      if (inside && c + k < Config::kC) word |= uint32_t(source[k * stride]) << 16 * k;
    return word;
  }

  /// channels_last: a row of the window at a time.
  CUTLASS_DEVICE static void elements_of_channels(Arguments const& args, char* tile, int n, int c, int h, int w) {
    constexpr int kItems = L::kColumns * kWords;
    constexpr int kBatch = cute::min(kInFlight, ceil_div(kItems, L::kThreads));
    CUTLASS_PRAGMA_NO_UNROLL
    for (int row = 0; row < L::kRows; ++row) {
      bool const row_inside = unsigned(h + row) < unsigned(args.h);
      Bits const* const source = static_cast<Bits const*>(args.x) + (row_inside ? GlobalIndex<Config>::x(args, n, c, h + row, w) : 0);
      CUTLASS_PRAGMA_NO_UNROLL
      for (int first = threadIdx.x; first < kItems; first += kBatch * L::kThreads) {
        uint32_t word[kBatch];
        CUTLASS_PRAGMA_UNROLL
        for (int b = 0; b < kBatch; ++b) {
          int const i = first + b * L::kThreads, column = i / kWords, channel = i % kWords * kWordChannels;
          bool const inside = i < kItems && row_inside && unsigned(w + column) < unsigned(args.w);
          word[b] = load_word(source + int64_t(column) * Config::kC + channel, 1, c + channel, inside);
        }
        CUTLASS_PRAGMA_UNROLL
        for (int b = 0; b < kBatch; ++b) {
          int const i = first + b * L::kThreads;
          if (i < kItems) *reinterpret_cast<uint32_t*>(tile + L::offset(row, i / kWords, i % kWords * kWordChannels)) = word[b];
        }
      }
    }
  }

  /// contiguous: a warp takes lines, a line being 16 bytes of channels of a row, 8 columns (one bank each) at a time.
  CUTLASS_DEVICE static void elements_of_columns(Arguments const& args, char* tile, int n, int c, int h, int w) {
    constexpr int kUnits = L::kUsedChannels / kUnitChannels, kLines = L::kRows * kUnits, kGroups = ceil_div(L::kColumns, 8);
    constexpr int kBatch = cute::min(kInFlight, kGroups), kTogether = kInFlight / kBatch;
    int const lane = threadIdx.x % 32, word_channel = lane / 8 * kWordChannels;
    int64_t const plane = int64_t(args.h) * args.w;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int first_line = threadIdx.x / 32; first_line < kLines; first_line += L::kWarps * kTogether)
      CUTLASS_PRAGMA_NO_UNROLL
      for (int first_column = lane % 8; first_column < L::kColumns; first_column += 8 * kBatch) {
        uint32_t word[kTogether][kBatch];
        CUTLASS_PRAGMA_UNROLL
        for (int a = 0; a < kTogether; ++a) {
          int const line = first_line + a * L::kWarps, row = line / kUnits, channel = line % kUnits * kUnitChannels + word_channel;
          bool const line_inside = line < kLines && unsigned(h + row) < unsigned(args.h) && c + channel < Config::kC;
          Bits const* const source =
              static_cast<Bits const*>(args.x) + (line_inside ? GlobalIndex<Config>::x(args, n, c + channel, h + row, w) : 0);
          CUTLASS_PRAGMA_UNROLL
          for (int b = 0; b < kBatch; ++b) {
            int const column = first_column + 8 * b;
            bool const inside = line_inside && column < L::kColumns && unsigned(w + column) < unsigned(args.w);
            word[a][b] = load_word(source + column, plane, c + channel, inside);
          }
        }
        CUTLASS_PRAGMA_UNROLL
        for (int a = 0; a < kTogether; ++a) {
          int const line = first_line + a * L::kWarps;
          char* const target = tile + L::offset(line / kUnits, first_column, line % kUnits * kUnitChannels + word_channel);
          CUTLASS_PRAGMA_UNROLL
          for (int b = 0; b < kBatch; ++b)
            if (line < kLines && first_column + 8 * b < L::kColumns) *reinterpret_cast<uint32_t*>(target + 8 * b * 128) = word[a][b];
        }
      }
  }
};

/// A warp's part of the pointwise GEMM: acc[b] [16 pixels][kTileOc] += A (registers) x weights (shared memory).
template <class Config>
struct WarpMma {
  using G = Geometry<Config>;
  using P = PackedWeights<Config>;
  using Atom = typename Config::MmaAtom;
  static_assert(Config::kTileOc % 16 == 0);
  using Accumulator = float[Config::kBlocks][Config::kTileOc / 2];

  /// The lane's row of the four 8 x 16-byte matrices that one ldmatrix reads: output channels 0-7 and 8-15, each with both halves of k.
  CUTLASS_DEVICE static uint32_t lane_offset(int lane) {
    int const row = lane / 16 * 8 + lane % 8, unit = lane / 8 % 2;
    return row * 128 + ((unit ^ (row & 7)) << 4);
  }

  CUTLASS_DEVICE static void load(uint32_t (&b)[2][2], char const* weights, uint32_t lane_offset, int instruction, int part, int oc) {
    char const* address = weights + P::instruction_offset(instruction / 4 * 4, part) + oc * 128 + (lane_offset ^ instruction % 4 * 32);
    cute::SM75_U32x4_LDSM_N::copy(*reinterpret_cast<cute::uint128_t const*>(address), b[0][0], b[0][1], b[1][0], b[1][1]);
  }

  CUTLASS_DEVICE static void fma(float* c, uint32_t const (&a)[4], uint32_t const (&b)[2]) {
    Atom::fma(c[0], c[1], c[2], c[3], a[0], a[1], a[2], a[3], b[0], b[1], c[0], c[1], c[2], c[3]);
  }

  /// G::kInstructions instructions from `first` on. The tensor core truncates its fp32 sums: the fp32-grade form sums each call's 16 channels by
  /// themselves and adds them in fp32 arithmetic.
  CUTLASS_DEVICE static void accumulate(Accumulator& acc, OperandFragment<Config> const (&fragment)[G::kInstructions],
                                        char const* weights, uint32_t lane_offset, int first) {
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < Config::kTileOc / 8; j += 2) {
      float sum[Config::kBlocks][8];
      CUTLASS_PRAGMA_UNROLL
      for (int m = 0; m < Config::kBlocks; ++m)
        CUTLASS_PRAGMA_UNROLL
        for (int k = 0; k < 8; ++k) sum[m][k] = Config::kSplit ? 0.f : acc[m][4 * j + k];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < G::kInstructions; ++i) {
        uint32_t b[P::kParts][2][2];
        CUTLASS_PRAGMA_UNROLL
        for (int part = 0; part < P::kParts; ++part) load(b[part], weights, lane_offset, first + i, part, 8 * j);
        if constexpr (Config::kSplit) {
          CUTLASS_PRAGMA_UNROLL
          for (int product = 0; product < SplitProducts::kCount; ++product)
            multiply(sum, fragment[i].a[SplitProducts::a(product)], b[SplitProducts::b(product)]);
        } else {
          multiply(sum, fragment[i].a[0], b[0]);
        }
      }
      CUTLASS_PRAGMA_UNROLL
      for (int m = 0; m < Config::kBlocks; ++m)
        CUTLASS_PRAGMA_UNROLL
        for (int k = 0; k < 8; ++k) acc[m][4 * j + k] = Config::kSplit ? acc[m][4 * j + k] + sum[m][k] : sum[m][k];
    }
  }

  CUTLASS_DEVICE static void multiply(float (&sum)[Config::kBlocks][8], uint32_t const (&a)[Config::kBlocks][4],
                                      uint32_t const (&b)[2][2]) {
    CUTLASS_PRAGMA_UNROLL
    for (int m = 0; m < Config::kBlocks; ++m)
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 2; ++i) fma(sum[m] + 4 * i, a[m], b[i]);
  }
};

template <class Config>
CUTLASS_DEVICE void separable2d_portable(Arguments const& args, char* shared) {
  using G = Geometry<Config>;
  using L = PortableLayout<Config>;
  using P = PackedWeights<Config>;
  using Mma = WarpMma<Config>;
  using Rolled = RolledDepthwise<Config>;
  // A grid of more than 2^31 - 1 blocks takes a second dimension.
  int64_t const index = int64_t(blockIdx.y) * gridDim.x + blockIdx.x;
  if (index >= PortableTile<Config>::count(args)) return;
  auto* const tile_address = reinterpret_cast<PortableTile<Config>*>(shared + L::kTileOffset);
  if (threadIdx.x == 0) *tile_address = PortableTile<Config>(args, index);
  PortableTile<Config> const& tile = *tile_address;  // from the first __syncthreads() on
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  // The warp's first pixel within the block's tile, and the lane's first window column.
  int const warp_q = warp % Config::kWarpsQ * G::kWarpQ, warp_p = warp / Config::kWarpsQ * G::kWarpP;
  int const column = (warp_q + G::kLaneQ * g) * Config::kStrideW;
  char* const window = shared + L::kWeightBytes;
  char const* const lane_window = window + warp_p * Config::kStrideH * L::kRowBytes;
  auto const* const workspace = static_cast<char const*>(args.workspace);
  uint32_t const b_offset = Mma::lane_offset(lane);

  bool const broken_weights = weights_broken<Config>(args, lane);

  float check = broken_weights ? __int_as_float(0x7fffffff) : 0.f;
  PixelScale<Config> scale;
  typename Mma::Accumulator acc = {};

  CUTLASS_PRAGMA_NO_UNROLL
  for (int chunk = 0; chunk < G::kChunks; ++chunk) {
    int const c = chunk * Config::kSlotChannels;
    __syncthreads();  // everybody is done with the chunk before
    char const* const stage = workspace + int64_t(tile.oc_tile * G::kChunks + chunk) * P::kStageBytes;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int i = threadIdx.x * 16; i < L::kWeightBytes; i += L::kThreads * 16)
      cute::SM80_CP_ASYNC_CACHEGLOBAL<cute::uint128_t>::copy(*reinterpret_cast<cute::uint128_t const*>(stage + i),
                                                             *reinterpret_cast<cute::uint128_t*>(shared + i));
    if constexpr (!Config::kGather)
      WindowLoader<Config>::load(args, window, tile.n, c, tile.p * Config::kStrideH - args.pad_top,
                                 tile.q * Config::kStrideW - args.pad_left);
    cute::cp_async_fence();
    cute::cp_async_wait<0>();
    __syncthreads();

    auto const* depthwise_weights = reinterpret_cast<float const*>((Config::kDwShared ? shared : stage) + P::kPointwiseBytes);
    int const steps = ceil_div(min(Config::kSlotChannels, Config::kC - c), L::kGroupChannels) * Config::kMmaSteps;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int s = 0; s < steps; s += Config::kMmaSteps) {
      typename DepthwiseOperand<Config>::Value value[Config::kMmaSteps];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Config::kMmaSteps; ++i) {
        DepthwiseWeights<Config> const weights(depthwise_weights, s + i, t);
        if constexpr (Config::kGather) {
          GatheredDepthwise<Config>::compute(value[i], args, weights, tile.n, c + (s + i) * G::kStepChannels + G::channel_of(t, 0),
                                             tile.p + warp_p, tile.q + warp_q + G::kLaneQ * g);
        } else if constexpr (Rolled::kNeeded) {
          Rolled::compute(value[i], lane_window, L::kRowBytes, L::kAtomBytes, weights, column, t, s + i);
        } else {
          DepthwiseOperand<Config>::compute(
              value[i], PixelMajorRow<Config>(column, t), [&](int r) { return lane_window + r * L::kRowBytes; }, weights, s + i,
              L::kAtomBytes);
        }
      }
      if constexpr (Config::kSplit) scale.update(value, check);
      OperandFragment<Config> fragment[G::kInstructions];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < G::kInstructions; ++i) fragment[i].assign(value + i * G::kInstructionSteps, scale, check);
      Mma::accumulate(acc, fragment, shared, b_offset, s / G::kInstructionSteps);
    }
  }

  int const p = tile.p + warp_p, q = tile.q + warp_q, oc = tile.oc_tile * Config::kTileOc;
  if (__any_sync(0xffffffffu, check != check)) {
    exact_pixels<Config>(args, tile.n, oc, p, q, lane);
  } else {
    DirectEpilogue<Config>::store(args, acc, scale, tile.n, oc, p, q + G::kLaneQ * g, t);
  }
}

}  // namespace cutlass_sep
