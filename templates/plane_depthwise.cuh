// The depthwise stage of large kernels, a kernel of its own: mma.sync with Toeplitz matrices of the taps, on planes of 16-bit values.
//
// One channel, a row of taps: A[m][k] = x[8m + k], of eight blocks m of 8 output columns, whose 8 x 8 matrices lie side by side in a plane; B[k][n] =
// tap[k - n], so that D[m][n] is output 8m + n. An MMA has two rows of x and of outputs, and what is loaded of two rows serves every row of outputs
// that they reach. A warp has a channel. Where a tile has fewer than 8 blocks of an image, the others are of further images.
//
// Planes lie in the workspace, which a kernel before fills (pack_planes): behind the tables of taps, [channel][image][row][column] with `shift`
// zeros before a row's first pixel, by which TMA's windows start on 16 bytes. Zero fill is the rest of the padding. Outputs go to `args.y`, the x of
// the pointwise kernel. A kernel of one row of taps takes all rows of all images as one image's.
//
// A block keeps the taps of kPlaneChannels channels and marches down strips of their maps, a tile at a time, with the rows of x in a ring: each comes
// once for all tiles of a strip. What it writes of a pixel is then at least a sector of 32 bytes, unless shared memory holds but 8 channels.
#pragma once

namespace cutlass_sep {

template <class Config>
struct PlaneLayout {
  using Element = typename Config::Element;
  static constexpr int kChannels = Config::kPlaneChannels, kThreads = 32 * kChannels;
  static_assert(kChannels % 8 == 0 && Config::kC % 8 == 0);
  /// Outputs of a tile: rows, columns, images.
  static constexpr int kP = Config::kPlaneRows, kQ = Config::kPlaneColumns, kBlocks = kQ / 8, kImages = 8 / kBlocks;
  static_assert(kP % 2 == 0 && 8 % kBlocks == 0 && Config::kStrideH == 1 && Config::kStrideW == 1);
  static constexpr bool kOneRow = Config::kKernelH == 1;
  static_assert(kOneRow || Config::kDilationH == 1);
  /// Matrices that the taps of a row reach, from the first column of a block on.
  static constexpr int kReach = (Config::kKernelW - 1) * Config::kDilationW + 1, kMatrices = ceil_div(kReach + 7, 8);
  /// A slot of the ring has kP rows of x, a window so many slots: [channel][row][image][16 bytes]. The rows of a matrix are in banks of their own.
  static constexpr int kHalo = kMatrices - 1, kUnits = kBlocks + (kImages == 1 ? kHalo : round_up(kHalo, 2 * kBlocks));
  static constexpr int kWindow = ceil_div(kP + Config::kKernelH - 1, kP), kSlots = Config::kPlaneSlots;
  static constexpr int kRowBytes = kImages * kUnits * 16, kChannelBytes = kP * kRowBytes, kSlotBytes = kChannels * kChannelBytes;
  static_assert(kSlots >= kWindow && kSlotBytes % 128 == 0);
  /// Taps of a row of a channel: word e + 1 holds entries e and e + 1 of the row, from -1 on; the last is zero.
  static constexpr int kWords = kReach + 2, kChannelWords = Config::kKernelH * kWords, kTapsBytes = kChannels * kChannelWords * 4;
  /// Outputs before they leave: [channel][row][8 blocks][8 columns], and 16 bytes.
  static constexpr int kStagingPitch = kP * 128 + 16, kStagingBytes = Config::kChannelsLast ? kChannels * kStagingPitch : 0;
  static constexpr int kTapsOffset = kSlots * kSlotBytes, kStagingOffset = kTapsOffset + kTapsBytes;
  static constexpr int kBarrierOffset = kStagingOffset + kStagingBytes, kSharedBytes = kBarrierOffset + (1 + kSlots) * 8;
  static constexpr int kGroups = ceil_div(Config::kC, kChannels);
  /// Where, in the workspace, it says whether outputs are not finite in fp16 (mend_outputs), and where planes start.
  static constexpr int64_t kFlagOffset = int64_t(kGroups) * kTapsBytes, kPlaneOffset = (kFlagOffset + 4 + 255) / 256 * 256;

  CUTLASS_DEVICE static int images(Arguments const& args) { return kOneRow ? 1 : args.n; }
  CUTLASS_DEVICE static int rows(Arguments const& args) { return kOneRow ? args.n * args.p : args.p; }
  CUTLASS_DEVICE static int shift(Arguments const& args) { return args.pad_left % 8; }
};

/// A tile of outputs of a group of channels. Indices go down a strip first, then over strips, then over groups.
template <class Config>
struct PlaneTile {
  using L = PlaneLayout<Config>;
  int group, n, p, q;
  bool last;  // of its strip

  CUTLASS_DEVICE static int64_t count(Arguments const& args) {
    return int64_t(L::kGroups) * ceil_div(L::images(args), L::kImages) * ceil_div(args.q, L::kQ) * ceil_div(L::rows(args), L::kP);
  }
  CUTLASS_DEVICE PlaneTile(Arguments const& args, int index) {
    int const down = ceil_div(L::rows(args), L::kP), across = ceil_div(args.q, L::kQ), deep = ceil_div(L::images(args), L::kImages);
    p = index % down * L::kP;
    last = index % down == down - 1;
    index /= down;
    q = index % across * L::kQ;
    index /= across;
    n = index % deep * L::kImages;
    group = index / deep;
  }
};

/// Requests, in one thread, for the slots that the block's tiles take, in their order. Tile by tile of a strip a slot is added; a strip, or what the
/// block has of it, starts with a whole window.
template <class Config>
struct PlaneLoads {
  using L = PlaneLayout<Config>;
  int index, end;  // tile
  int slots = 0;   // of its window that have been asked for
  int free = L::kSlots;
  RingCursor<L::kSlots> ring;

  CUTLASS_DEVICE PlaneLoads(int first, int last) : index(first), end(last) {}

  /// As many as there is room for.
  CUTLASS_DEVICE void ask(Arguments const& args, cute::TmaDescriptor const& x_map, FullBarrier* full, char* shared) {
    constexpr auto kHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
    CUTLASS_PRAGMA_NO_UNROLL
    while (free > 0 && index < end) {
      PlaneTile<Config> const tile(args, index);
      full[ring.slot].arrive_and_expect_tx(L::kSlotBytes);
      cute::SM90_TMA_LOAD_4D::copy(&x_map, reinterpret_cast<uint64_t*>(&full[ring.slot]), kHint, shared + ring.slot * L::kSlotBytes,
                                   tile.q - args.pad_left + L::shift(args), tile.n, tile.p - args.pad_top + slots * L::kP,
                                   tile.group * L::kChannels);
      ring.advance();
      --free;
      if (++slots >= L::kWindow) {  // the tile's window is complete
        slots = tile.last ? 0 : L::kWindow - 1;
        ++index;
      }
    }
  }
};

/// Outputs of one channel's tile. Lane: of row 2i + h, columns 8g + 2t + j are value[i][2h + j].
template <class Config>
struct PlaneDepthwise {
  using L = PlaneLayout<Config>;
  using Value = float[L::kP / 2][4];

  /// `x`: byte of the channel's rows in the first slot of the ring, from `ring` on. `first`: the slot where the window starts. `taps`: the channel's
  /// table. `live`: the first row of the window that is inside the map, and how many are.
  CUTLASS_DEVICE static void compute(Value& value, char const* ring, int x, int first, char const* taps, float bias, int2 live, int lane) {
    int const m = lane % 8, g = lane / 4, t = lane % 4, next = lane / 8 % 2;  // next: the lane's rows are the second of two
    x += (m / L::kBlocks * L::kUnits + m % L::kBlocks + lane / 16) * 16;
    int slot[L::kWindow];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < L::kWindow; ++i) slot[i] = x + (first + i - (first + i >= L::kSlots ? L::kSlots : 0)) * L::kSlotBytes;
    // The lane's first word of a row of taps; of the matrices at its ends, if that is not outside.
    int const entry = 2 * t - g;
    char const *const words = taps + (entry + 1) * 4, *const zero = taps + (L::kWords - 1) * 4;
    char const* ends[3] = {entry >= -1 && entry < L::kReach ? words : zero};
    CUTLASS_PRAGMA_UNROLL
    for (int k = 1; k < 3; ++k) ends[k] = entry + 8 * (L::kMatrices - k) < L::kReach ? words + 32 * (L::kMatrices - k) : zero;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < L::kP / 2; ++i)
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < 4; ++j) value[i][j] = bias;
    // Rows i and i + 1 of the window, as registers of A, serve every row of outputs 2j under the row of taps i - 2j: b[r % kP] are those of row r.
    constexpr int kPairs = L::kP + Config::kKernelH - 2;
    constexpr int kStep = L::kOneRow ? 2 : 1;  // one row of taps: no row of x is in two pairs
    constexpr int kAhead = L::kMatrices > 12 ? 0 : 1;
    Rows a[1 + kAhead];
    uint32_t b[L::kP][L::kMatrices];
    auto const fetch_rows = [&](int i) {
      if (i >= kPairs) return;
      int const in_slot = i % L::kP;
      int own = slot[i / L::kP] + next * L::kRowBytes;
      if (in_slot == L::kP - 1) own = next ? slot[(i + 1) / L::kP] - in_slot * L::kRowBytes : own;
      load(a[i / kStep % (1 + kAhead)], ring + own + in_slot * L::kRowBytes);
    };
    auto const fetch_taps = [&](int r) {
      if (r >= Config::kKernelH) return;
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < L::kMatrices; ++k) {
        int const back = L::kMatrices - k;
        char const* const word = k == 0 ? ends[0] : back <= 2 ? ends[back] : words + 32 * k;
        b[r % L::kP][k] = *reinterpret_cast<uint32_t const*>(word + r * L::kWords * 4);
      }
    };
    fetch_taps(0);
    if (kAhead) fetch_rows(0);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kPairs; i += kStep) {
      fetch_rows(i + kAhead * kStep);
      fetch_taps(i + 1);
      if (!L::kOneRow && uint32_t(i + 1 - live.x) > uint32_t(live.y)) continue;  // both rows are padding
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < L::kMatrices; k += 2)
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < L::kP / 2; ++j) {
          int const r = i - 2 * j;
          if (r < 0 || r >= Config::kKernelH) continue;
          float(&d)[4] = value[j];
          uint32_t const* const q = a[i / kStep % (1 + kAhead)] + 2 * k;
          uint32_t const(&t)[L::kMatrices] = b[r % L::kP];
          if (k + 1 == L::kMatrices) Config::DepthwiseTailAtom::fma(d[0], d[1], d[2], d[3], q[0], q[1], t[k], d[0], d[1], d[2], d[3]);
          else Config::DepthwiseAtom::fma(d[0], d[1], d[2], d[3], q[0], q[1], q[2], q[3], t[k], t[k + 1], d[0], d[1], d[2], d[3]);
        }
    }
  }

 private:
  using Rows = uint32_t[2 * L::kMatrices];

  /// Matrices of two rows, in the order of A: those of both rows, for each matrix of a row. `address`: the lane's row of the first four.
  CUTLASS_DEVICE static void load(Rows& a, char const* address) {
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < L::kMatrices; k += 2) {
      auto const& at = *reinterpret_cast<cute::uint128_t const*>(address + k * 16);
      uint32_t* const q = a + 2 * k;
      if (k + 1 < L::kMatrices) cute::SM75_U32x4_LDSM_N::copy(at, q[0], q[1], q[2], q[3]);
      else cute::SM75_U32x2_LDSM_N::copy(at, q[0], q[1]);
    }
  }
};

/// Makes a lane's outputs anew that zero times Inf or NaN has spoiled. `pair(i)`: where its two columns of row i of the tile are.
template <class Config, class Pair>
CUTLASS_DEVICE void mend_plane(Arguments const& args, PlaneTile<Config> const& tile, int c, int lane, Pair const& pair) {
  using L = PlaneLayout<Config>;
  using Element = typename L::Element;
  int const block = lane / 4, column = tile.q + block % L::kBlocks * 8 + lane % 4 * 2;
  CUTLASS_PRAGMA_NO_UNROLL
  for (int i = 0; i < 2 * L::kP; ++i) {
    int const row = tile.p + i / 2, q = column + i % 2;
    int const n = L::kOneRow ? row / args.p : tile.n + block / L::kBlocks, p = L::kOneRow ? row % args.p : row;
    if (n >= args.n || p >= args.p || q >= args.q) continue;
    Element& value = reinterpret_cast<Element*>(pair(i / 2))[i % 2];
    if (float(value) != float(value)) value = Element(Config::MidActivation::apply(depthwise_from_global<Config>(args, n, c, p, q)));
  }
}

/// From [channel][row][column] to [pixel][channel] in global memory, by all warps of the block.
template <class Config>
CUTLASS_DEVICE void store_planes(Arguments const& args, PlaneTile<Config> const& tile, char const* staging, int warp, int lane) {
  using L = PlaneLayout<Config>;
  using Element = typename L::Element;
  // A matrix has 8 channels and 8 columns and comes transposed: lane (g, t) gets the channels in rows 2t and 2t + 1 of column g. Which channels its
  // rows are is free: such that a lane's of all groups of 8 lie side by side.
  constexpr int kDeep = L::kChannels / 8, kAtOnce = 4 / kDeep;  // matrices of a block of 8 columns; blocks of a load
  constexpr int kOwn = L::kP / kDeep;                           // blocks of a warp
  static_assert(kDeep <= 2);
  int const g = lane / 4, t = lane % 4;
  int const channel = lane % 8 / 2 * 2 * kDeep + lane / 8 % kDeep * 2 + lane % 2;
  char const* const from = staging + channel * L::kStagingPitch;
  int const c = tile.group * L::kChannels + t * 2 * kDeep;
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kOwn; i += kAtOnce) {
    uint32_t w[4];
    int const block = warp * kOwn + min(i + lane / 8 / kDeep, kOwn - 1);
    cute::SM75_U16x8_LDSM_T::copy(*reinterpret_cast<cute::uint128_t const*>(from + block * 16), w[0], w[1], w[2], w[3]);
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < kAtOnce && i + k < kOwn; ++k) {
      int const own = warp * kOwn + i + k, across = own % 8;
      int const n = tile.n + across / L::kBlocks, p = tile.p + own / 8, q = tile.q + across % L::kBlocks * 8 + g;
      if (n >= L::images(args) || p >= L::rows(args) || q >= args.q || c >= Config::kC) continue;
      Element* const to = static_cast<Element*>(args.y) + ((int64_t(n) * L::rows(args) + p) * args.q + q) * Config::kC + c;
      if constexpr (kDeep == 2) *reinterpret_cast<uint2*>(to) = {w[2 * k], w[2 * k + 1]};
      else *reinterpret_cast<uint32_t*>(to) = w[k];
    }
  }
}

template <class Config>
CUTLASS_DEVICE void plane_depthwise(Arguments const& args, cute::TmaDescriptor const& x_map, char* shared) {
  using L = PlaneLayout<Config>;
  using Element = typename L::Element;
  int const warp = cutlass::canonical_warp_idx_sync(), lane = cutlass::canonical_lane_idx();
  char *const taps = shared + L::kTapsOffset, *const staging = shared + L::kStagingOffset;
  auto* const taps_full = reinterpret_cast<FullBarrier*>(shared + L::kBarrierOffset);
  FullBarrier* const full = taps_full + 1;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 1 + L::kSlots; ++i) taps_full[i].init(1);
    cutlass::arch::fence_barrier_init();
    cute::prefetch_tma_descriptor(&x_map);
  }
  __syncthreads();
  await_grid_before();
  admit_next_grid();

  int64_t const tiles = PlaneTile<Config>::count(args);
  int const first = int(tiles * blockIdx.x / gridDim.x), last = int(tiles * (blockIdx.x + 1) / gridDim.x);
  PlaneLoads<Config> loads(first, last);
  if (threadIdx.x == 0) loads.ask(args, x_map, full, shared);
  RingCursor<L::kSlots> ring;  // where the window starts
  int waited = 0, group = -1;  // slots of the window that are known to be there; whose taps are
  uint32_t taps_parity = 0;
  float bias = 0.f;

  CUTLASS_PRAGMA_NO_UNROLL
  for (int index = first; index < last; ++index) {
    PlaneTile<Config> const tile(args, index);
    int const c = tile.group * L::kChannels + warp;
    if (tile.group != group) {  // all warps are behind the last tile's barrier: nobody reads the taps before
      group = tile.group;
      if (threadIdx.x == 0) {
        taps_full->arrive_and_expect_tx(L::kTapsBytes);
        cute::SM90_BULK_COPY_G2S::copy(static_cast<char const*>(args.workspace) + int64_t(group) * L::kTapsBytes,
                                       reinterpret_cast<uint64_t*>(taps_full), taps, L::kTapsBytes);
      }
      __syncwarp();
      if (Config::kDwBias && c < Config::kC) bias = float(static_cast<Element const*>(args.dw_bias)[c]);
      taps_full->wait(taps_parity);
      taps_parity ^= 1;
    }
    for (; waited < L::kWindow; ++waited) {
      auto const slot = ring.after(waited);
      full[slot.slot].wait(slot.parity);
    }
    uint32_t pair[L::kP], vanished = 0;
    float check = 0.f;
    {
      typename PlaneDepthwise<Config>::Value value;
      PlaneDepthwise<Config>::compute(value, shared, warp * L::kChannelBytes, ring.slot, taps + warp * L::kChannelWords * 4, bias,
                                      {args.pad_top - tile.p, args.h}, lane);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < L::kP; ++i) {
        float const* const two = &value[i / 2][i % 2 * 2];
        check = fmaf(two[0], 0.f, fmaf(two[1], 0.f, check));
        pair[i] = pack_pair<Element>(Config::MidActivation::apply(two[0]), Config::MidActivation::apply(two[1]));
        if (Config::kFp16Range) vanished = add_vanished<Element>(pair[i], vanished);
      }
    }
    if (Config::kFp16Range && vanished != 0) *reinterpret_cast<int*>(static_cast<char*>(args.workspace) + L::kFlagOffset) = 1;
    __syncthreads();  // nobody reads the window's first slot any more, nor what the staging buffer had before
    int const done = tile.last || index == last - 1 ? L::kWindow : 1;
    if (threadIdx.x == 0) {
      loads.free += done;
      loads.ask(args, x_map, full, shared);
    }
    __syncwarp();
    ring = ring.after(done);
    waited -= done;
    if constexpr (Config::kChannelsLast) {
      char* const staged = staging + warp * L::kStagingPitch + lane * 4;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < L::kP; ++i) *reinterpret_cast<uint32_t*>(staged + i * 128) = pair[i];
      if (check != check && c < Config::kC) mend_plane<Config>(args, tile, c, lane, [&](int i) { return staged + i * 128; });
      __syncthreads();
      store_planes<Config>(args, tile, staging, warp, lane);
    } else if (c < Config::kC) {
      int const block = lane / 4, n = tile.n + block / L::kBlocks, q = tile.q + block % L::kBlocks * 8 + lane % 4 * 2;
      auto const at = [&](int i) {
        int const row = tile.p + i;
        int64_t const plane = L::kOneRow ? (int64_t(row / args.p) * Config::kC + c) * args.p + row % args.p
                                         : (int64_t(n) * Config::kC + c) * args.p + row;
        return static_cast<Element*>(args.y) + plane * args.q + q;
      };
      int const rows = n < L::images(args) && q < args.q ? L::rows(args) - tile.p : 0;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < L::kP; ++i)
        if (i < rows) *reinterpret_cast<uint32_t*>(at(i)) = pair[i];  // rows are a multiple of 16 bytes
      if (check != check) mend_plane<Config>(args, tile, c, lane, at);
    }
  }
}

/// The kernel before: tables of taps and planes.
template <class Config>
CUTLASS_DEVICE void pack_planes(Arguments const& args) {
  using L = PlaneLayout<Config>;
  using Element = typename L::Element;
  constexpr int kTables = L::kGroups * L::kChannels;
  await_grid_before();
  admit_next_grid();
  int block = blockIdx.x;
  if (block == 0 && threadIdx.x == 0) *reinterpret_cast<int*>(static_cast<char*>(args.workspace) + L::kFlagOffset) = 0;
  if (block < kTables) {
    auto* const words = reinterpret_cast<uint32_t*>(args.workspace) + int64_t(block) * L::kChannelWords;
    auto const* const weight = static_cast<uint16_t const*>(args.dw_weight) + int64_t(block) * Config::kKernelH * Config::kKernelW;
    #pragma unroll 4
    for (int i = threadIdx.x; i < L::kChannelWords; i += kPackThreads) {
      int const entry = i % L::kWords - 1, r = i / L::kWords;
      uint32_t word = 0;
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < 2; ++k) {
        int const e = entry + k;
        if (block < Config::kC && e >= 0 && e < L::kReach && e % Config::kDilationW == 0)
          word |= uint32_t(weight[r * Config::kKernelW + e / Config::kDilationW]) << 16 * k;
      }
      words[i] = word;
    }
    return;
  }
  block -= kTables;
  int const shift = L::shift(args), units = ceil_div(args.w + shift, 8), rows = args.n * args.h;
  auto const* const x = static_cast<uint16_t const*>(args.x);
  char* const planes = static_cast<char*>(args.workspace) + L::kPlaneOffset;
  if constexpr (Config::kChannelsLast) {
    // 64 channels of 64 columns of a row, turned in shared memory.
    constexpr int kPitch = 66;  // by which 8 channels and 4 columns are in banks of their own
    __shared__ alignas(4) uint16_t turned[64 * kPitch];
    int const channel_tiles = ceil_div(Config::kC, 64);
    int const c = block % channel_tiles * 64, tile = block / channel_tiles % ceil_div(units, 8), row = block / channel_tiles / ceil_div(units, 8);
    CUTLASS_PRAGMA_UNROLL
    for (int i = threadIdx.x; i < 64 * 8; i += kPackThreads) {
      int const j = i / 8, own = c + i % 8 * 8, w = tile * 64 + j - shift;
      uint4 eight = {};
      if (w >= 0 && w < args.w && own < Config::kC) eight = *reinterpret_cast<uint4 const*>(x + (int64_t(row) * args.w + w) * Config::kC + own);
      auto const* const value = reinterpret_cast<uint16_t const*>(&eight);
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < 8; ++k) turned[(i % 8 * 8 + k) * kPitch + j] = value[k];
    }
    __syncthreads();
    CUTLASS_PRAGMA_UNROLL
    for (int i = threadIdx.x; i < 64 * 8; i += kPackThreads) {
      int const own = i / 8, unit = tile * 8 + i % 8;
      auto const* const from = reinterpret_cast<uint32_t const*>(turned + own * kPitch + i % 8 * 8);
      if (c + own < Config::kC && unit < units)
        *reinterpret_cast<uint4*>(planes + ((int64_t(c + own) * rows + row) * units + unit) * 16) = {from[0], from[1], from[2], from[3]};
    }
  } else {
    int64_t const i = int64_t(block) * kPackThreads + threadIdx.x;
    if (i >= int64_t(Config::kC) * rows * units) return;
    int const unit = int(i % units), row = int(i / units % rows), c = int(i / units / rows);
    auto const* const from = x + ((int64_t(row / args.h) * Config::kC + c) * args.h + row % args.h) * args.w;
    uint32_t word[4];
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < 4; ++k) {
      int const w = unit * 8 + 2 * k - shift;
      word[k] = (w >= 0 && w < args.w ? from[w] : 0) | (w + 1 >= 0 && w + 1 < args.w ? uint32_t(from[w + 1]) << 16 : 0);
    }
    *reinterpret_cast<uint4*>(planes + i * 16) = {word[0], word[1], word[2], word[3]};
  }
}

}  // namespace cutlass_sep
