// The separable operator on Hopper: one persistent, warp-specialised kernel.
//
// A producer warp brings rows of x to a ring in shared memory by TMA (whose zero fill is the padding) and the weights beside them: packed ones,
// or for the tensor cores' depthwise stage pointwise weights as they are, with a table of taps, which the three warps beside it make of taps as
// they are, or a launch before (kPacksTaps).
// Every consumer warpgroup makes the depthwise outputs of its own tile of pixels in registers, by fp32 FMA (depthwise_operand.cuh) or on the
// tensor cores (diagonal_depthwise.cuh), and feeds them to wgmma as its A operand; the accumulators leave through the epilogue. The depthwise
// outputs never touch shared or global memory. Contiguous rows for the tensor cores are turned to pixel-major ones as they come, by the same
// three warps (turn_rows.cuh).
//
// Work items are (image, block of output rows, strip of kTileQ columns, tile of output channels). If one pass takes all channels, an item
// is marched down: its steps (warpgroup tiles) go round robin to the warpgroups and share the rows in the ring. Otherwise an item is one
// step a warpgroup and the rows come once for every chunk of channels; for tensor cores they come as one window, a slot of the ring. The
// warpgroups' tiles lie below each other, with `kSideBySide` (maps of one row) next to each other along W. With `kSplitChannels` they have one
// tile, take the chunks in turn, and the first adds up what all of them have. With `kRunWindow` the map is one row of all its pixels to tiles and
// stores, and a window has the rows of x under an item from end to end, in that many pixels of a slot.
//
// tests/test_separable_protocol.py goes through the waits and arrivals of all warps in random order: whoever changes them here changes them there.
#pragma once

namespace cutlass_sep {

// Of diagonal_depthwise.cuh and turn_rows.cuh, which are not there without a kernel that takes them.
template <class Config>
struct DiagonalDepthwise;
template <class Config>
struct TurnedColumns;
template <class Config, int Columns>
struct TurnedRow;

/// Warps beside the producer, which fill in taps and turn rows.
constexpr int kHelperWarps = 3;

template <class Config>
struct Sm90Layout {
  using G = Geometry<Config>;
  using P = PackedWeights<Config>;
  static constexpr int kWarpgroups = Config::kWarpgroups;
  /// Whether helper warps fill in the taps of every stage of weights; they, and those that turn rows, get more registers where there are some.
  static constexpr bool kFillsTaps = !P::kPacked && Config::kDepthwise && !Config::kPacksTaps;
  static constexpr bool kRoomBeside = kFillsTaps && kWarpgroups < 3;
  static constexpr int kProducerRegisters = kRoomBeside ? 40 : kWarpgroups == 2 ? 24 : 32;
  static constexpr int kConsumerRegisters = kWarpgroups == 1   ? 240
                                            : kWarpgroups == 2 ? (kRoomBeside ? 232 : 240)
                                                               : 160;
  static constexpr int kThreads = 128 * (kWarpgroups + 1);
  // A warp waits without end for registers that neither the launch gave to the block nor other warps give back.
  static_assert(kProducerRegisters + kWarpgroups * kConsumerRegisters <= (kWarpgroups + 1) * (65536 / kThreads / 8 * 8));
  /// Pixels of a warpgroup's tile.
  static constexpr int kTileQ = Config::kWarpsQ * G::kWarpQ;
  static constexpr int kTileP = 4 / Config::kWarpsQ * G::kWarpP;
  static constexpr int kWindowRows = G::window_rows(kTileP);
  /// Columns of a work item, and warpgroup tiles down it that are worked on at a time.
  static constexpr int kItemQ = Config::kSideBySide ? kWarpgroups * kTileQ : kTileQ;
  static constexpr int kTilesDown = Config::kSideBySide || Config::kSplitChannels ? 1 : kWarpgroups;
  /// A row of the ring: channels_last, and contiguous when turned, [128-byte group][column][128 bytes]; else contiguous [channel][column].
  CUTLASS_HOST_DEVICE static constexpr int columns() {
    if constexpr (Config::kChannelsLast) return G::window_cols(kItemQ);
    else if constexpr (G::kTurned) return TurnedColumns<Config>::padded(Config::kPhase + G::window_cols(kItemQ));
    else return ChannelMajorRow<Config>::pitch(Config::kPhase + G::window_cols(kItemQ));
  }
  static constexpr int kColumns = columns();
  static constexpr bool kMarch = G::kChunks == 1;
  /// Channels of a pass.
  CUTLASS_DEVICE static int channels(int chunk) { return min(Config::kSlotChannels, Config::kC - chunk * Config::kSlotChannels); }
  /// Rows of x in a slot of the ring: one, or a work item's.
  static constexpr bool kWholeWindow = G::kTensorDepthwise && !kMarch;
  static constexpr int kSlotRows = kWholeWindow ? G::window_rows(kTilesDown * kTileP) : 1;
  static constexpr int kAtomChannels = 128 / G::kElementBytes;
  static constexpr int kAtoms = Config::kSlotChannels / kAtomChannels;
  static constexpr int kAtomBytes = G::kRuns ? Config::kRunWindow * 128 : round_up(kSlotRows * kColumns * 128, 1024);
  static_assert(!G::kRuns || (kWholeWindow && Config::kMmaQ == 16 && Config::kBlocks == 1 && Config::kRunWindow % 8 == 0));
  static constexpr int kSlotBytes =
      Config::kPixelMajor ? kAtoms * kAtomBytes : round_up(Config::kSlotChannels * kColumns * G::kElementBytes, 1024);
  /// Columns of a row of a run's window: with a multiple of 8 TMA's swizzle depends on the column alone.
  CUTLASS_DEVICE static int pitch(Arguments const& args) { return round_up(G::window_cols(args.q), 8); }
  CUTLASS_DEVICE static int slot_transaction(Arguments const& args) {
    int const pixels = G::kRuns ? G::window_rows(args.steps) * pitch(args) : kSlotRows * kColumns;
    return Config::kSlotChannels * pixels * G::kElementBytes;
  }
  /// The tensor core truncates its fp32 sums: the fp32-grade form adds every chunk (64 channels) in fp32 registers instead.
  static constexpr bool kPromote = Config::kSplit && G::kChunks > 1;
  static_assert(!Config::kSplit || Config::kSlotChannels <= 64);
  static constexpr bool kResidentWeights = G::kChunks <= Config::kWeightSlots && G::kOcTiles == 1;
  /// Epilogue staging: what one TMA store writes. channels_last: 16 pixels of a block, each kStoreBytes of output channels; contiguous: kGroupOc
  /// output channels, each a row of the warpgroup's pixels, up to 128 bytes at a time. The 16-byte units of a row are swizzled as TMA does for that
  /// width.
  static constexpr int kTileOcBytes = Config::kTileOc * G::kElementBytes;
  static constexpr int kStoreBytes = !Config::kChannelsLast    ? cute::min(kTileQ * G::kElementBytes, 128)
                                     : kTileOcBytes % 128 == 0 ? 128
                                     : kTileOcBytes % 64 == 0  ? 64
                                     : kTileOcBytes % 32 == 0  ? 32
                                                               : 16;
  static constexpr int kGroupOc = Config::kChannelsLast          ? kStoreBytes / G::kElementBytes
                                  : !G::kTurned                  ? (Config::kTileOc % 16 == 0 ? 16 : 8)
                                  : Config::kTileOc % 32 == 0    ? 32
                                  : cute::min(Config::kTileOc, 16);
  static constexpr int kGroups = Config::kTileOc / kGroupOc;
  /// contiguous: columns that a store has, stores of a row of the tile, bytes of one.
  static constexpr int kStoreQ = kStoreBytes / G::kElementBytes, kStoresQ = kTileQ / kStoreQ, kStoreBoxBytes = kGroupOc * kStoreBytes;
  static constexpr int kGroupBytes = Config::kChannelsLast ? Config::kBlocks * round_up(16 * kStoreBytes, 1024)
                                                           : kTileP * kStoresQ * kStoreBoxBytes / 4;
  static constexpr int kStagingWarpBytes = Config::kStagingGroups * kGroupBytes;
  static_assert(kGroups % Config::kStagingGroups == 0);

  static constexpr int kWeightOffset = Config::kRowSlots * kSlotBytes;
  static constexpr int kStagingOffset = kWeightOffset + Config::kWeightSlots * P::kStageBytes;
  static constexpr int kStagingBytes = 4 * (Config::kSplitChannels ? 1 : kWarpgroups) * kStagingWarpBytes;
  /// Sums, and the check, that a warpgroup gives to the first: [value][thread].
  static constexpr int kGivenOffset = kStagingOffset + kStagingBytes;
  static constexpr int kGivenBytes = Config::kSplitChannels ? (Config::kBlocks * Config::kTileOc / 2 + 1) * 128 * 4 : 0;
  static constexpr int kBarrierOffset = kGivenOffset + (kWarpgroups - 1) * kGivenBytes;
  static constexpr int kBarriers = (G::kTurned ? 3 : 2) * Config::kRowSlots + (kFillsTaps ? 3 : 2) * Config::kWeightSlots;
  static constexpr int kSharedBytes = kBarrierOffset + kBarriers * 8;
};

/// What a work item covers.
template <class Config>
struct WorkItem {
  using L = Sm90Layout<Config>;
  int n, p, q, oc_tile, steps;  // image, first output row and column, tile of output channels, warpgroup tiles down

  CUTLASS_DEVICE static int count(Arguments const& args) {
    return args.n * ceil_div(L::G::map_p(args), args.steps * L::kTileP) * ceil_div(L::G::map_q(args), L::kItemQ) * L::G::kOcTiles;
  }
  CUTLASS_DEVICE WorkItem(Arguments const& args, int index) {
    int const strips = ceil_div(L::G::map_q(args), L::kItemQ), rows = args.steps * L::kTileP;
    oc_tile = index % L::G::kOcTiles;
    index /= L::G::kOcTiles;
    q = index % strips * L::kItemQ;
    index /= strips;
    int const blocks = ceil_div(L::G::map_p(args), rows);
    p = index % blocks * rows;
    n = index / blocks;
    steps = L::kMarch ? min(args.steps, ceil_div(args.p - p, L::kTileP)) : L::kTilesDown;
  }
  /// Slots of the ring that its rows take.
  CUTLASS_DEVICE int slots() const { return L::kWholeWindow ? 1 : L::G::window_rows(steps * L::kTileP); }
};

template <class Config>
struct Sm90Shared {
  using L = Sm90Layout<Config>;
  char* base;
  FullBarrier* row_full;
  EmptyBarrier* row_empty;
  FullBarrier* weight_full;
  EmptyBarrier* weight_empty;
  FullBarrier* taps_landed;  // taps are there, and not yet in their table
  FullBarrier* row_landed;   // turned: a row is there, and not yet turned

  CUTLASS_DEVICE explicit Sm90Shared(char* raw) : base(raw) {
    row_full = reinterpret_cast<FullBarrier*>(base + L::kBarrierOffset);
    row_empty = reinterpret_cast<EmptyBarrier*>(row_full + Config::kRowSlots);
    weight_full = reinterpret_cast<FullBarrier*>(row_empty + Config::kRowSlots);
    weight_empty = reinterpret_cast<EmptyBarrier*>(weight_full + Config::kWeightSlots);
    taps_landed = reinterpret_cast<FullBarrier*>(weight_empty + Config::kWeightSlots);
    row_landed = taps_landed + (L::kFillsTaps ? Config::kWeightSlots : 0);
  }
  CUTLASS_DEVICE char* row(int slot) const { return base + slot * L::kSlotBytes; }
  CUTLASS_DEVICE char* weights(int slot) const { return base + L::kWeightOffset + slot * L::P::kStageBytes; }
  /// Of the stage: DiagonalTaps.
  CUTLASS_DEVICE char* taps(int slot) const { return weights(slot) + L::P::kPointwiseBytes; }
  CUTLASS_DEVICE char* staging(int warp) const { return base + L::kStagingOffset + warp * L::kStagingWarpBytes; }
  /// This thread's first value of those that `warpgroup` (not the first) gives.
  CUTLASS_DEVICE float* given(int warpgroup) const {
    return reinterpret_cast<float*>(base + L::kGivenOffset + (warpgroup - 1) * L::kGivenBytes) + threadIdx.x % 128;
  }

  CUTLASS_DEVICE void initialise() const {
    for (int i = 0; i < Config::kRowSlots; ++i) {
      row_full[i].init(L::G::kTurned ? kHelperWarps : 1);
      row_empty[i].init(4 * L::kWarpgroups);
      if constexpr (L::G::kTurned) row_landed[i].init(1);
    }
    for (int i = 0; i < Config::kWeightSlots; ++i) {
      weight_full[i].init(1 + (L::kFillsTaps ? kHelperWarps : 0));
      weight_empty[i].init(4 * L::kWarpgroups);
      if constexpr (L::kFillsTaps) taps_landed[i].init(1);
    }
    cutlass::arch::fence_barrier_init();
  }
};

/// Fills a slot of the ring. Turned: `x_map` has squares of 64 pixels and channels, `x_unit_map` 8 pixels of as many channels.
template <class Config>
CUTLASS_DEVICE void load_row(cute::TmaDescriptor const& x_map, cute::TmaDescriptor const& x_unit_map, FullBarrier& barrier, char* row,
                             int channel, int w, int h, int n) {
  using L = Sm90Layout<Config>;
  auto* mbarrier = reinterpret_cast<uint64_t*>(&barrier);
  constexpr auto kHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  if constexpr (Config::kChannelsLast) {
    CUTLASS_PRAGMA_UNROLL
    for (int atom = 0; atom < L::kAtoms; ++atom)
      cute::SM90_TMA_LOAD_4D::copy(&x_map, mbarrier, kHint, row + atom * L::kAtomBytes, channel + atom * L::kAtomChannels, w, h, n);
  } else if constexpr (L::G::kTurned) {
    using Row = TurnedRow<Config, L::kColumns>;
    auto const load = [&](cute::TmaDescriptor const& map, char* to, int offset, int c, int r) {
      cute::SM90_TMA_LOAD_4D::copy(&map, mbarrier, kHint, to + offset, w + offset / 128, h + r, c, n);
    };
    CUTLASS_PRAGMA_NO_UNROLL
    for (int atom = 0; atom < L::kAtoms; ++atom)
      CUTLASS_PRAGMA_NO_UNROLL
      for (int r = 0; r < L::kSlotRows; ++r) {
        char* const to = row + atom * L::kAtomBytes + r * L::kColumns * 128;
        int const c = channel + atom * L::kAtomChannels;
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < Row::kSquares; ++i) load(x_map, to, Row::square_offset(i), c, r);
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < Row::kUnits; ++i) load(x_unit_map, to, Row::unit_offset(i), c, r);
      }
  } else {
    cute::SM90_TMA_LOAD_4D::copy(&x_map, mbarrier, kHint, row, w, h, channel, n);
  }
}

/// Brings the weights of an item's `chunk` to their stage: packed ones, or the pointwise ones as they are and a packed table of taps.
template <class Config>
CUTLASS_DEVICE void load_weights(Arguments const& args, cute::TmaDescriptor const& weight_map, FullBarrier& barrier, char* stage, int oc_tile,
                                 int chunk) {
  using L = Sm90Layout<Config>;
  using P = typename L::P;
  auto* const mbarrier = reinterpret_cast<uint64_t*>(&barrier);
  if constexpr (P::kPacked) {
    barrier.arrive_and_expect_tx(P::kStageBytes);
    char const* const packed = static_cast<char const*>(args.workspace) + int64_t(oc_tile * L::G::kChunks + chunk) * P::kStageBytes;
    cute::SM90_BULK_COPY_G2S::copy(packed, mbarrier, stage, P::kStageBytes);
  } else {
    constexpr auto kHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
    barrier.arrive_and_expect_tx(P::kPointwiseBytes + (Config::kPacksTaps ? P::Depthwise::kBytes : 0));
    if constexpr (Config::kPacksTaps) {
      char const* const table = static_cast<char const*>(args.workspace) + int64_t(chunk) * P::Depthwise::kBytes;
      cute::SM90_BULK_COPY_G2S::copy(table, mbarrier, stage + P::kPointwiseBytes, P::Depthwise::kBytes);
    }
    CUTLASS_PRAGMA_UNROLL
    for (int atom = 0; atom < L::kAtoms; ++atom)
      cute::SM90_TMA_LOAD_2D::copy(&weight_map, mbarrier, kHint, stage + atom * P::kPartBytes,
                                   chunk * Config::kSlotChannels + atom * L::kAtomChannels, oc_tile * Config::kTileOc);
  }
}

/// Brings taps and biases of `chunk` to where DiagonalTaps::fill reads them.
template <class Config>
CUTLASS_DEVICE void load_taps(Arguments const& args, FullBarrier& barrier, char* table, int chunk) {
  using T = DiagonalTaps<Config>;
  int const channels = Sm90Layout<Config>::channels(chunk);  // a multiple of 8
  auto const copy = [&](void const* tensor, char* to, int elements) {
    auto const* const from = static_cast<typename Config::Element const*>(tensor) + int64_t(chunk) * Config::kSlotChannels * elements;
    cute::SM90_BULK_COPY_G2S::copy(from, reinterpret_cast<uint64_t*>(&barrier), to, channels * elements * 2);
  };
  barrier.arrive_and_expect_tx(channels * (T::kTaps + Config::kDwBias) * 2);
  copy(args.dw_weight, table + T::kTableBytes, T::kTaps);
  if constexpr (Config::kDwBias) copy(args.dw_bias, table + T::kTableBytes + T::kRawTapsBytes, 1);
}

template <class Config>
CUTLASS_DEVICE void produce(Arguments const& args, cute::TmaDescriptor const& x_map, cute::TmaDescriptor const& x_unit_map,
                            cute::TmaDescriptor const& weight_map, Sm90Shared<Config> const& shared) {
  using L = Sm90Layout<Config>;
  RingCursor<Config::kRowSlots> row;
  RingCursor<Config::kWeightSlots> weight;
  FullBarrier* const row_landed = L::G::kTurned ? shared.row_landed : shared.row_full;
  int const items = WorkItem<Config>::count(args);
  bool first = true;
  for (int index = blockIdx.x; index < items; index += gridDim.x) {
    WorkItem<Config> const item(args, index);
    int const w = (L::G::kRuns ? 0 : item.q * Config::kStrideW) - args.pad_left - Config::kPhase;
    int const h = (L::G::kRuns ? item.q / args.q : item.p) * Config::kStrideH - args.pad_top;
    int const rows = item.slots();
    CUTLASS_PRAGMA_NO_UNROLL  // a thread of few registers
    for (int chunk = 0; chunk < L::G::kChunks; ++chunk) {
      if (!L::kResidentWeights || first) {
        shared.weight_empty[weight.slot].wait(weight.parity ^ 1);
        load_weights<Config>(args, weight_map, shared.weight_full[weight.slot], shared.weights(weight.slot), item.oc_tile, chunk);
        if constexpr (L::kFillsTaps) load_taps<Config>(args, shared.taps_landed[weight.slot], shared.taps(weight.slot), chunk);
        weight.advance();
      }
      CUTLASS_PRAGMA_NO_UNROLL
      for (int r = 0; r < rows; ++r) {
        shared.row_empty[row.slot].wait(row.parity ^ 1);
        row_landed[row.slot].arrive_and_expect_tx(L::slot_transaction(args));
        load_row<Config>(x_map, x_unit_map, row_landed[row.slot], shared.row(row.slot), chunk * Config::kSlotChannels, w, h + r,
                         item.n);
        row.advance();
      }
    }
    first = false;
  }
}

/// Warp `warp` of kHelperWarps: its part of every stage's taps, and of every slot to be turned.
template <class Config>
CUTLASS_DEVICE void help(Arguments const& args, Sm90Shared<Config> const& shared, int warp, int lane) {
  using L = Sm90Layout<Config>;
  RingCursor<Config::kRowSlots> row;
  RingCursor<Config::kWeightSlots> weight;
  int const items = WorkItem<Config>::count(args);
  bool first = true;
  CUTLASS_PRAGMA_NO_UNROLL
  for (int index = blockIdx.x; index < items; index += gridDim.x) {
    CUTLASS_PRAGMA_NO_UNROLL
    for (int chunk = 0; chunk < L::G::kChunks; ++chunk) {
      if (!L::kResidentWeights || first) {
        shared.taps_landed[weight.slot].wait(weight.parity);
        using T = DiagonalTaps<Config>;
        char* const table = shared.taps(weight.slot);
        auto const* const raw = reinterpret_cast<typename Config::Element const*>(table + T::kTableBytes);
        T::template fill<kHelperWarps>(table, raw, raw + T::kRawTapsBytes / 2, L::channels(chunk), warp, lane);
        __syncwarp();
        if (lane == 0) shared.weight_full[weight.slot].arrive();
        weight.advance();
      }
      if constexpr (L::G::kTurned) {
        using Row = TurnedRow<Config, L::kColumns>;
        Row const turned(lane);
        CUTLASS_PRAGMA_NO_UNROLL
        for (int slots = WorkItem<Config>(args, index).slots(); slots > 0; --slots) {
          shared.row_landed[row.slot].wait(row.parity);
          CUTLASS_PRAGMA_NO_UNROLL
          for (int i = warp; i < L::kAtoms * L::kSlotRows * Row::kBatches; i += kHelperWarps) {
            int const part = i / Row::kBatches;
            turned.turn(shared.row(row.slot) + part / L::kSlotRows * L::kAtomBytes + part % L::kSlotRows * L::kColumns * 128, i % Row::kBatches);
          }
          cutlass::arch::fence_view_async_shared();  // TMA writes here next
          __syncwarp();
          if (lane == 0) shared.row_full[row.slot].arrive();
          row.advance();
        }
      }
    }
    first = false;
    if (L::kResidentWeights && !L::G::kTurned) return;
  }
}

/// The warpgroup's part of the pointwise GEMM: acc[b] [64 pixels][kTileOc] += A (registers) x weights (shared memory).
template <class Config>
struct PointwiseMma {
  using G = Geometry<Config>;
  using P = PackedWeights<Config>;
  using Atom = typename Config::MmaAtom;
  using Accumulator = float[Config::kBlocks][Config::kTileOc / 2];

  template <int... I>
  CUTLASS_DEVICE static void fma(uint32_t const (&a)[4], uint64_t b, float (&c)[Config::kTileOc / 2], bool accumulate,
                                 cute::integer_sequence<int, I...>) {
    Atom::fma(a[0], a[1], a[2], a[3], b, c[I]..., accumulate ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero);
  }

  /// Issues and commits G::kInstructions instructions. `weights` is the chunk's stage, `first` the first instruction within the chunk.
  CUTLASS_DEVICE static void issue(Accumulator& acc, OperandFragment<Config> const (&fragment)[G::kInstructions], char const* weights,
                                   int first, bool accumulate) {
    using Indices = cute::make_int_sequence<Config::kTileOc / 2>;
    constexpr int kProducts = Config::kSplit ? SplitProducts::kCount : 1;
    cute::warpgroup_arrive();
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < G::kInstructions; ++i)
      CUTLASS_PRAGMA_UNROLL
      for (int product = 0; product < kProducts; ++product) {
        int const part_a = Config::kSplit ? SplitProducts::a(product) : 0, part_b = Config::kSplit ? SplitProducts::b(product) : 0;
        uint64_t const b_descriptor = k_major_descriptor(weights + P::instruction_offset(first + i, part_b));
        CUTLASS_PRAGMA_UNROLL
        for (int b = 0; b < Config::kBlocks; ++b) fma(fragment[i].a[part_a][b], b_descriptor, acc[b], accumulate, Indices{});
        accumulate = true;
      }
    cute::warpgroup_commit_batch();
  }
};

/// Where the warps of one warpgroup meet.
struct TogetherBarrier {
  int warpgroup;
  CUTLASS_DEVICE uint32_t id() const { return 12 + warpgroup; }  // behind CUTLASS's own and those of SplitSums
  CUTLASS_DEVICE void sync() const { asm volatile("bar.sync %0, 128;" ::"r"(id()) : "memory"); }
  /// Whether `value` is true in any thread.
  CUTLASS_DEVICE bool any(bool value) const {
    uint32_t result;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.u32 p, %1, 0;\n"
        "bar.red.or.pred p, %2, 128, p;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(result)
        : "r"(uint32_t(value)), "r"(id())
        : "memory");
    return __any_sync(0xffffffffu, result != 0);  // lets the compiler see that all lanes agree
  }
};

/// Accumulators to y, with bias and activation. Lane: column pairs 8j + 2t of rows g and g + 8 of every block.
template <class Config>
struct Sm90Epilogue {
  using G = Geometry<Config>;
  using L = Sm90Layout<Config>;
  using Element = typename Config::Element;
  using Accumulator = typename PointwiseMma<Config>::Accumulator;

  /// Sums to values of y, in place. (p, q): the warp's first pixel.
  CUTLASS_DEVICE static void apply(Arguments const& args, Accumulator& acc, PixelScale<Config> const& scale, int n, int oc, int p, int q,
                                   int lane) {
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < Config::kTileOc / 8; ++j) {
      OutputChannels<Config> const channels(args, oc + 8 * j + lane % 4 * 2);
      CUTLASS_PRAGMA_UNROLL
      for (int b = 0; b < Config::kBlocks; ++b)
        CUTLASS_PRAGMA_UNROLL
        for (int h = 0; h < 2; ++h)
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < 2; ++i)
            acc[b][4 * j + 2 * h + i] = channels.finish(acc[b][4 * j + 2 * h + i], i, scale.inverse(b, h));
    }
    if constexpr (Config::kResidual) add_residual(args, acc, n, oc + lane % 4 * 2, p, q, lane / 4);
  }

  /// Vectors along the layout's contiguous dimension; TMA's alignment rules make each lie inside or outside as a whole. `oc` is the lane's
  /// first, (p, q) the warp's.
  CUTLASS_DEVICE static void add_residual(Arguments const& args, Accumulator& acc, int n, int oc, int p, int q, int g) {
    auto const* const x = static_cast<Element const*>(args.block_x);
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < Config::kTileOc / 8; ++j) {
      if constexpr (Config::kChannelsLast) {
        CUTLASS_PRAGMA_UNROLL
        for (int b = 0; b < Config::kBlocks; ++b)
          CUTLASS_PRAGMA_UNROLL
          for (int h = 0; h < 2; ++h) {
            int const pixel_p = p + G::pixel_p(b, h), pixel_q = q + G::pixel_q(g, h);
            if (pixel_p >= args.p || pixel_q >= args.q || oc + 8 * j >= Config::kO) continue;
            float value[2];
            load_vector<Element>(value, x + GlobalIndex<Config>::y(args, n, oc + 8 * j, pixel_p, pixel_q));
            CUTLASS_PRAGMA_UNROLL
            for (int i = 0; i < 2; ++i) acc[b][4 * j + 2 * h + i] += value[i];
          }
      } else {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 2; ++i) {
          int const pixel_q = q + G::pixel_q(g, 0);
          if (p >= args.p || pixel_q >= args.q || oc + 8 * j + i >= Config::kO) continue;
          float value[G::kLaneQ];
          load_vector<Element>(value, x + GlobalIndex<Config>::y(args, n, oc + 8 * j + i, p, pixel_q));
          CUTLASS_PRAGMA_UNROLL
          for (int m = 0; m < G::kLaneQ; ++m) acc[m / 2][4 * j + 2 * (m % 2) + i] += value[m];
        }
      }
    }
  }

  /// Byte of 16-byte unit `unit` of row `row` of a staged group.
  CUTLASS_DEVICE static int staging_offset(int row, int unit) {
    return row * L::kStoreBytes + (unit ^ (row * L::kStoreBytes >> 7 & (L::kStoreBytes / 16 - 1))) * 16;
  }

  /// channels_last: where a block's pixel of MMA row g + 8h lies in its staged 16.
  CUTLASS_DEVICE static int staged_pixel(int g, int h) { return G::kTensorDepthwise ? g + 8 * h : 2 * g + h; }

  /// channels_last: one block's 16 pixels x kGroupOc output channels, from column group `first` (8 columns each) on.
  CUTLASS_DEVICE static void stage_pixels(char* buffer, float const (&acc)[Config::kTileOc / 2], int first, int lane) {
    int const g = lane / 4, t = lane % 4;
    if constexpr (G::kElementBytes == 4) {
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < L::kGroupOc / 8; ++k)
        CUTLASS_PRAGMA_UNROLL
        for (int h = 0; h < 2; ++h) {
          int const i = 4 * (first + k) + 2 * h;
          *reinterpret_cast<float2*>(buffer + staging_offset(staged_pixel(g, h), 2 * k + t / 2) + t % 2 * 8) = make_float2(acc[i], acc[i + 1]);
        }
    } else if constexpr (L::kGroupOc % 16 == 0) {
      // Matrix m of a store: row half m % 2 of column group m / 2; lane l addresses row l % 8 of matrix l / 8.
      int const pixel = staged_pixel(lane % 8, lane / 8 % 2);
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < L::kGroupOc / 8; k += 2) {
        uint32_t packed[4];
        CUTLASS_PRAGMA_UNROLL
        for (int m = 0; m < 4; ++m) {
          int const i = 4 * (first + k + m / 2) + 2 * (m % 2);
          packed[m] = pack_pair<Element>(acc[i], acc[i + 1]);
        }
        cute::SM90_U32x4_STSM_N::copy(packed[0], packed[1], packed[2], packed[3],
                                      *reinterpret_cast<cute::uint128_t*>(buffer + staging_offset(pixel, k + lane / 16)));
      }
    } else {
      CUTLASS_PRAGMA_UNROLL
      for (int h = 0; h < 2; ++h)
        *reinterpret_cast<uint32_t*>(buffer + staging_offset(staged_pixel(g, h), 0) + 4 * t) =
            pack_pair<Element>(acc[4 * first + 2 * h], acc[4 * first + 2 * h + 1]);
    }
  }

  /// Where pixel (p, q) of the warpgroup's tile lies in the staged row of output channel `o` of a group.
  CUTLASS_DEVICE static int tile_offset(int o, int p, int q) {
    int const byte = q % L::kStoreQ * G::kElementBytes;
    return (p * L::kStoresQ + q / L::kStoreQ) * L::kStoreBoxBytes + staging_offset(o, byte >> 4) + (byte & 15);
  }

  /// Turned: kGroupOc output channels from column group `first` on of the warp's pixels, from (p, q) of the warpgroup's tile on.
  CUTLASS_DEVICE static void stage_turned(char* buffer, Accumulator const& acc, int first, int p, int q, int lane) {
    constexpr int kColumns = cute::min(L::kGroupOc / 8, 2);  // column groups of a store
    CUTLASS_PRAGMA_UNROLL
    for (int b = 0; b < Config::kBlocks; ++b) {
      // Matrix m of a store: row half m % 2 of column group m / 2; turned, its row is an output channel and 8 pixels.
      int const h = lane / 8 % 2, row = p + (Config::kMmaQ == 8 ? h : 0), column = q + b * Config::kMmaQ + (Config::kMmaQ == 8 ? 0 : 8 * h);
      char* const target = buffer + tile_offset(lane / 16 % kColumns * 8 + lane % 8, row, column);
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < L::kGroupOc / 8; k += kColumns) {
        uint32_t packed[4];
        CUTLASS_PRAGMA_UNROLL
        for (int m = 0; m < 2 * kColumns; ++m) {
          int const i = 4 * (first + k + m / 2) + 2 * (m % 2);
          packed[m] = pack_pair<Element>(acc[b][i], acc[b][i + 1]);
        }
        auto& to = *reinterpret_cast<cute::uint128_t*>(target + k * 8 * L::kStoreBytes);
        if constexpr (kColumns == 2) cute::SM90_U16x8_STSM_T::copy(packed[0], packed[1], packed[2], packed[3], to);
        else cute::SM90_U16x4_STSM_T::copy(packed[0], packed[1], to);
      }
    }
  }

  /// The same of sums by FMA, whose lanes have adjacent pixels of a row.
  CUTLASS_DEVICE static void stage_rows(char* buffer, Accumulator const& acc, int first, int p, int q, int lane) {
    int const g = lane / 4, t = lane % 4;
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < L::kGroupOc / 8; ++k) {
      int const j = first + k;
      if constexpr (G::kElementBytes == 4) {  // a lane's adjacent pixels of one output channel are one vector
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 2; ++i) {
          float value[G::kLaneQ];
          CUTLASS_PRAGMA_UNROLL
          for (int m = 0; m < G::kLaneQ; ++m) value[m] = acc[m / 2][4 * j + 2 * (m % 2) + i];
          *reinterpret_cast<cutlass::AlignedArray<float, G::kLaneQ>*>(buffer + tile_offset(8 * k + 2 * t + i, p, q + g * G::kLaneQ)) =
              convert_vector<float>(value);
        }
      } else {  // a transposed 8 x 8 matrix leaves lane (g, t) with output channel g and the pixels of lanes 2t and 2t + 1
        uint32_t column[G::kLaneQ];
        CUTLASS_PRAGMA_UNROLL
        for (int m = 0; m < G::kLaneQ; ++m)
          cute::SM75_U32x1_MOVM_T::copy(pack_pair<Element>(acc[m / 2][4 * j + 2 * (m % 2)], acc[m / 2][4 * j + 2 * (m % 2) + 1]), column[m]);
        cutlass::AlignedArray<uint32_t, G::kLaneQ> words;
        CUTLASS_PRAGMA_UNROLL
        for (int m = 0; m < G::kLaneQ; m += 2) {
          words[m / 2] = __byte_perm(column[m], column[m + 1], 0x5410);
          words[G::kLaneQ / 2 + m / 2] = __byte_perm(column[m], column[m + 1], 0x7632);
        }
        *reinterpret_cast<cutlass::AlignedArray<uint32_t, G::kLaneQ>*>(buffer + tile_offset(8 * k + g, p, q + 2 * t * G::kLaneQ)) = words;
      }
    }
  }

  /// contiguous: the warpgroup stages its tile together, and its warps store the boxes of a group at the same time, so that whole rows of the tile
  /// go out side by side; TMA clips at the ends of O, Q and P. (p, q): the tile's first pixel. Returns whether `broken` is true in a thread of the
  /// warpgroup; then the stores have landed.
  CUTLASS_DEVICE static bool store_tile(cute::TmaDescriptor const& y_map, Accumulator const& acc, char* staging, int warpgroup, int n, int oc,
                                        int p, int q, int warp, int lane, bool broken) {
    TogetherBarrier const together{warpgroup};
    constexpr int kGroupBytes = 4 * L::kGroupBytes, kBoxes = L::kTileP * L::kStoresQ;
    CUTLASS_PRAGMA_UNROLL
    for (int group = 0; group < L::kGroups; ++group) {
      char* const buffer = staging + group % Config::kStagingGroups * kGroupBytes;
      if (lane == 0) cute::tma_store_wait<Config::kStagingGroups - 1>();  // of these buffers, in turn, the next has been read
      together.sync();
      int const first = group * (L::kGroupOc / 8), warp_p = warp / Config::kWarpsQ * G::kWarpP, warp_q = warp % Config::kWarpsQ * G::kWarpQ;
      if constexpr (G::kTurned) stage_turned(buffer, acc, first, warp_p, warp_q, lane);
      else stage_rows(buffer, acc, first, warp_p, warp_q, lane);
      cute::tma_store_fence();
      if (group + 1 < L::kGroups) together.sync();
      else broken = together.any(broken);
      if (lane == 0) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kBoxes; i += 4) {
          int const box = i + warp;
          if (kBoxes % 4 == 0 || box < kBoxes)
            cute::SM90_TMA_STORE_4D::copy(&y_map, buffer + box * L::kStoreBoxBytes, q + box % L::kStoresQ * L::kStoreQ, p + box / L::kStoresQ,
                                          oc + group * L::kGroupOc, n);
        }
        cute::tma_store_arrive();
      }
    }
    if (broken) {
      if (lane == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
      together.sync();
    }
    return broken;
  }

  /// channels_last: through the warp's staging buffers and out by TMA, which clips at the ends of O, Q and P. (p, q): the warp's first pixel.
  CUTLASS_DEVICE static void store(cute::TmaDescriptor const& y_map, Accumulator const& acc, char* staging, int n, int oc, int p, int q,
                                   int lane) {
    constexpr int kBlockBytes = L::kGroupBytes / Config::kBlocks;
    CUTLASS_PRAGMA_UNROLL
    for (int first = 0; first < L::kGroups; first += Config::kStagingGroups) {
      if (lane == 0) cute::tma_store_wait<0>();  // the stores before have left the buffers
      __syncwarp();
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Config::kStagingGroups; ++i)
        CUTLASS_PRAGMA_UNROLL
        for (int b = 0; b < Config::kBlocks; ++b)
          stage_pixels(staging + i * L::kGroupBytes + b * kBlockBytes, acc[b], (first + i) * (L::kGroupOc / 8), lane);
      cute::tma_store_fence();
      __syncwarp();
      if (lane == 0) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < Config::kStagingGroups; ++i)
          CUTLASS_PRAGMA_UNROLL
          for (int b = 0; b < Config::kBlocks; ++b)
            cute::SM90_TMA_STORE_4D::copy(&y_map, staging + i * L::kGroupBytes + b * kBlockBytes, oc + (first + i) * L::kGroupOc, q,
                                          p + G::pixel_p(b, 0), n);
        cute::tma_store_arrive();
      }
    }
  }
};

/// The rows under a warp's window: addresses of consecutive ring slots.
template <class Config>
struct RingRows {
  using G = Geometry<Config>;
  static constexpr int kAtomBytes = Sm90Layout<Config>::kAtomBytes;
  char const* address[G::kWindowP];
  CUTLASS_DEVICE RingRows(Sm90Shared<Config> const& shared, int slot) {
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < G::kWindowP; ++r) {
      address[r] = shared.row(slot);
      slot = slot + 1 == Config::kRowSlots ? 0 : slot + 1;
    }
  }
  CUTLASS_DEVICE char const* operator()(int r) const { return address[r]; }
  CUTLASS_DEVICE static constexpr int phase(int) { return 0; }
};

/// The same where one slot holds them all, [row][column]; addresses are from the window's first pixel on.
template <class Config>
struct WindowRows {
  static constexpr int kColumns = Sm90Layout<Config>::kColumns, kAtomBytes = Sm90Layout<Config>::kAtomBytes;
  char const* address;
  CUTLASS_DEVICE char const* operator()(int r) const { return address + r * kColumns * 128; }
  /// Columns by which the swizzle of row r is turned.
  CUTLASS_DEVICE static constexpr int phase(int r) { return r * kColumns % 8; }
};

/// The same of a run.
template <class Config>
struct RunRows {
  static constexpr int kAtomBytes = Sm90Layout<Config>::kAtomBytes;
  char const* address;
  int row_bytes;
  CUTLASS_DEVICE char const* operator()(int r) const { return address + r * row_bytes; }
  CUTLASS_DEVICE static constexpr int phase(int) { return 0; }
};

/// acc (+)= weights x depthwise(x) over the chunk's `channels`. The depthwise outputs of a block of MMA steps are made while the tensor
/// cores still work on the block before; the last block is left in flight.
template <class Config, class View>
CUTLASS_DEVICE void accumulate(typename PointwiseMma<Config>::Accumulator& acc, View const& view, RingRows<Config> const& rows,
                               char const* weights, int channels, bool zero, int t, PixelScale<Config>& scale,
                               float& check) {
  using G = Geometry<Config>;
  using Mma = PointwiseMma<Config>;
  auto const* depthwise_weights = reinterpret_cast<float const*>(weights + PackedWeights<Config>::kPointwiseBytes);
  int const steps = ceil_div(channels, G::kStepChannels * Config::kMmaSteps) * Config::kMmaSteps;
  CUTLASS_PRAGMA_NO_UNROLL
  for (int s = 0; s < steps; s += Config::kMmaSteps) {
    typename DepthwiseOperand<Config>::Value value[Config::kMmaSteps];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Config::kMmaSteps; ++i)
      DepthwiseOperand<Config>::compute(value[i], view, rows, DepthwiseWeights<Config>(depthwise_weights, s + i, t), s + i,
                                        Sm90Layout<Config>::kAtomBytes);
    if constexpr (Config::kSplit) scale.update(value, check);
    cute::warpgroup_wait<0>();
    OperandFragment<Config> fragment[G::kInstructions];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < G::kInstructions; ++i) fragment[i].assign(value + i * G::kInstructionSteps, scale, check);
    Mma::issue(acc, fragment, weights, s / G::kInstructionSteps, !zero);
    zero = false;
  }
}

/// One of a warp's MMA blocks, for itself.
template <class Config>
struct OneBlock : Config {
  static constexpr int kBlocks = 1;
};

/// The rows under one of the blocks that lie side by side.
template <class Config, class Rows>
struct BlockRows {
  static constexpr int kAtomBytes = Rows::kAtomBytes;
  Rows const& rows;
  int block;
  CUTLASS_DEVICE char const* operator()(int r) const { return rows(r) + block * Config::kMmaQ * Config::kStrideW * 128; }
  CUTLASS_DEVICE static constexpr int phase(int r) { return Rows::phase(r); }
};

/// The same with the depthwise stage on the tensor cores, 32 channels and a block of pixels at a time. An mma.sync waits for the wgmmas of its own
/// warpgroup: the other warpgroups fill the gap. Without a depthwise convolution x is the operand as it is, of all blocks.
template <class Config, class View, class Rows>
CUTLASS_DEVICE void accumulate_diagonal(typename PointwiseMma<Config>::Accumulator& acc, View const& view, Rows const& rows, char const* weights,
                                        int channels, bool zero, int lane, float& check) {
  char const* const taps = weights + PackedWeights<Config>::kPointwiseBytes;
  int const groups = ceil_div(channels, 32);
  CUTLASS_PRAGMA_NO_UNROLL
  for (int group = 0; group < groups; ++group) {
    if constexpr (Config::kDepthwise) {
      using One = OneBlock<Config>;
      using Accumulator = typename PointwiseMma<One>::Accumulator;
      CUTLASS_PRAGMA_UNROLL
      for (int b = 0; b < Config::kBlocks; ++b) {
        typename DepthwiseOperand<One>::Value value[2];
        view.compute(value, BlockRows<Config, Rows>{rows, b}, taps, group, lane);
        cute::warpgroup_wait<0>();
        OperandFragment<One> fragment[2];
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 2; ++i) fragment[i].assign(value + i, PixelScale<One>{}, check);
        PointwiseMma<One>::issue(reinterpret_cast<Accumulator&>(acc[b]), fragment, weights, 2 * group, !zero);
      }
    } else {
      OperandFragment<Config> fragment[2];
      cute::warpgroup_wait<0>();
      view.read(fragment, rows, group);
      PointwiseMma<Config>::issue(acc, fragment, weights, 2 * group, !zero);
    }
    zero = false;
  }
}

/// Brings the sums of all warpgroups to the first, where their channels are split. A warpgroup's values in shared memory are its own until they
/// are `full`, then the first's until they are `free` again.
template <class Config>
struct SplitSums {
  using Accumulator = typename PointwiseMma<Config>::Accumulator;
  static constexpr int kValues = Config::kTileOc / 2;
  bool given = false;  // before

  CUTLASS_DEVICE static cutlass::arch::NamedBarrier full(int warpgroup) { return {256u, uint32_t(2 * warpgroup - 2)}; }
  CUTLASS_DEVICE static cutlass::arch::NamedBarrier free(int warpgroup) { return {256u, uint32_t(2 * warpgroup - 1)}; }

  CUTLASS_DEVICE void give(Sm90Shared<Config> const& shared, int warpgroup, Accumulator const& acc, float check) {
    end(warpgroup);
    given = true;
    float* const values = shared.given(warpgroup);
    CUTLASS_PRAGMA_UNROLL
    for (int b = 0; b < Config::kBlocks; ++b)
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kValues; ++i) values[(b * kValues + i) * 128] = acc[b][i];
    values[Config::kBlocks * kValues * 128] = check;
    full(warpgroup).arrive();
  }
  CUTLASS_DEVICE static void take(Sm90Shared<Config> const& shared, Accumulator& acc, float& check) {
    CUTLASS_PRAGMA_UNROLL
    for (int warpgroup = 1; warpgroup < Config::kWarpgroups; ++warpgroup) {
      full(warpgroup).sync();
      float const* const values = shared.given(warpgroup);
      CUTLASS_PRAGMA_UNROLL
      for (int b = 0; b < Config::kBlocks; ++b)
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kValues; ++i) acc[b][i] += values[(b * kValues + i) * 128];
      check += values[Config::kBlocks * kValues * 128];
      free(warpgroup).arrive();
    }
  }
  /// What was given has been taken.
  CUTLASS_DEVICE void end(int warpgroup) const {
    if (given) free(warpgroup).sync();
  }
};

template <class Config>
CUTLASS_DEVICE void consume(Arguments const& args, cute::TmaDescriptor const& y_map, Sm90Shared<Config> const& shared, int warpgroup) {
  using G = Geometry<Config>;
  using L = Sm90Layout<Config>;
  using P = PackedWeights<Config>;
  using Mma = PointwiseMma<Config>;
  constexpr int kRowSlots = Config::kRowSlots;
  int const warp = cutlass::canonical_warp_idx_sync() % 4, lane = cutlass::canonical_lane_idx();
  int const g = lane / 4, t = lane % 4;
  // The warp's pixels within the item's columns and the warpgroup's rows.
  int const warp_q = (Config::kSideBySide ? warpgroup * L::kTileQ : 0) + warp % Config::kWarpsQ * G::kWarpQ;
  int const warp_p = warp / Config::kWarpsQ * G::kWarpP;
  int const column = (warp_q + G::kLaneQ * g) * Config::kStrideW;

  // Pixel-major, the warp's first pixel from the start of a slot: where one holds the item's window, in it; else in its row.
  int const window_p = (L::kTilesDown == 1 ? 0 : warpgroup * L::kTileP) + warp_p;
  int const row_pixel = Config::kPhase + warp_q * Config::kStrideW;
  auto view = [&] {
    using View = DiagonalDepthwise<cute::conditional_t<Config::kDepthwise, OneBlock<Config>, Config>>;
    if constexpr (G::kTensorDepthwise) return View(row_pixel + (L::kWholeWindow ? window_p * Config::kStrideH * L::kColumns : 0), lane);
    else if constexpr (Config::kChannelsLast) return PixelMajorRow<Config>(column, t);
    else return ChannelMajorRow<Config>(column, g, t, L::kColumns);
  }();

  bool const broken_weights = weights_broken<Config>(args, lane);

  RingCursor<kRowSlots> base;  // first row of the item's current chunk
  RingCursor<Config::kWeightSlots> weight;
  int released = 0;  // rows, from `base` on, that this warp has given back
  int turn = 0;      // steps of all items so far: decides whose turn a step is
  SplitSums<Config> split;

  // Gives back the rows [released, end) of the chunk. A warp sees every row full before it gives it back, also the rows it never reads, so
  // that it cannot be counted twice in one round of the ring.
  auto const release = [&](int end) {
    __syncwarp();
    CUTLASS_PRAGMA_NO_UNROLL  // unrolled, it takes registers that the loops around it need
    for (; released < end; ++released) {
      auto const row = base.after(released);
      shared.row_full[row.slot].wait(row.parity);
      if (lane == 0) shared.row_empty[row.slot].arrive();
    }
  };
  auto const release_weights = [&] {
    __syncwarp();
    shared.weight_full[weight.slot].wait(weight.parity);
    if (lane == 0) shared.weight_empty[weight.slot].arrive();
    weight.advance();
  };

  int const items = WorkItem<Config>::count(args);
  CUTLASS_PRAGMA_NO_UNROLL
  for (int index = blockIdx.x; index < items; index += gridDim.x) {
    WorkItem<Config> const item(args, index);
    int const rows = item.slots();
    auto const release_chunk = [&] {
      release(rows);
      released = 0;
      base = base.after(rows);
    };
    int const first_step = L::kTilesDown == 1 ? 0 : L::kMarch ? (warpgroup + L::kWarpgroups - turn) % L::kWarpgroups : warpgroup;
    turn = (turn + item.steps) % L::kWarpgroups;

    CUTLASS_PRAGMA_NO_UNROLL
    for (int step = first_step; step < item.steps; step += L::kTilesDown) {
      int const first_row = L::kWholeWindow ? 0 : step * L::kTileP * Config::kStrideH;
      int const oc = item.oc_tile * Config::kTileOc;
      int const p = item.p + step * L::kTileP + warp_p, q = item.q + warp_q;
      if constexpr (!L::kMarch) {
        // A tile wholly outside the output only lets the rings go on.
        if (item.p + step * L::kTileP >= G::map_p(args) || item.q + (Config::kSideBySide ? warpgroup * L::kTileQ : 0) >= G::map_q(args)) {
          for (int chunk = 0; chunk < G::kChunks; ++chunk) {
            release_chunk();
            if constexpr (!L::kResidentWeights) release_weights();
          }
          continue;
        }
      }
      int const pitch = G::kRuns ? L::pitch(args) : L::kColumns;
      if constexpr (G::kRuns) view.follow(args, q, item.q / args.q, pitch, lane);
      float check = broken_weights ? __int_as_float(0x7fffffff) : 0.f;
      PixelScale<Config> scale;
      typename Mma::Accumulator acc, total;
      CUTLASS_PRAGMA_NO_UNROLL
      for (int chunk = 0; chunk < G::kChunks; ++chunk) {
        if constexpr (Config::kSplitChannels) {
          if (chunk % L::kWarpgroups != warpgroup) {
            release_chunk();
            if constexpr (!L::kResidentWeights) release_weights();
            continue;
          }
        }
        int const slot = L::kResidentWeights ? chunk : weight.slot;
        shared.weight_full[slot].wait(L::kResidentWeights ? 0 : weight.parity);
        release(first_row);
        for (int r = 0; r < (L::kWholeWindow ? 1 : L::kWindowRows); ++r) {
          auto const row = base.after(first_row + r);
          shared.row_full[row.slot].wait(row.parity);
        }
        int const channels = L::channels(chunk);
        bool const zero = L::kPromote || chunk < (Config::kSplitChannels ? L::kWarpgroups : 1);
        if constexpr (G::kRuns) {
          RunRows<Config> const run_rows{shared.row(base.slot), pitch * 128};
          accumulate_diagonal<Config>(acc, view, run_rows, shared.weights(slot), channels, zero, lane, check);
        } else if constexpr (L::kWholeWindow) {
          accumulate_diagonal<Config>(acc, view, WindowRows<Config>{shared.row(base.slot)}, shared.weights(slot), channels, zero, lane, check);
        } else {
          RingRows<Config> const ring_rows(shared, base.after(first_row + warp_p * Config::kStrideH).slot);
          if constexpr (G::kTensorDepthwise) accumulate_diagonal<Config>(acc, view, ring_rows, shared.weights(slot), channels, zero, lane, check);
          else accumulate<Config>(acc, view, ring_rows, shared.weights(slot), channels, zero, t, scale, check);
        }
        if constexpr (L::kMarch) {
          release(min(rows, first_row + L::kTilesDown * L::kTileP * Config::kStrideH));
        } else {
          release_chunk();
          if constexpr (!L::kResidentWeights) {
            cute::warpgroup_wait<0>();
            release_weights();
          }
        }
        if constexpr (L::kPromote) {
          cute::warpgroup_wait<0>();
          CUTLASS_PRAGMA_UNROLL
          for (int b = 0; b < Config::kBlocks; ++b)
            CUTLASS_PRAGMA_UNROLL
            for (int i = 0; i < Config::kTileOc / 2; ++i) total[b][i] = chunk == 0 ? acc[b][i] : total[b][i] + acc[b][i];
        }
      }
      cute::warpgroup_wait<0>();
      typename Mma::Accumulator& result = L::kPromote ? total : acc;
      if constexpr (Config::kSplitChannels) {
        if (warpgroup > 0) {
          split.give(shared, warpgroup, acc, check);
          continue;
        }
        split.take(shared, acc, check);
      }

      Sm90Epilogue<Config>::apply(args, result, scale, item.n, oc, p, q, lane);
      // Bulk stores must have landed, not only left shared memory, before other lanes write over them.
      if constexpr (!Config::kChannelsLast) {
        int const tile_q = item.q + (Config::kSideBySide ? warpgroup * L::kTileQ : 0);
        if (Sm90Epilogue<Config>::store_tile(y_map, result, shared.staging(4 * warpgroup), warpgroup, item.n, oc, p - warp_p, tile_q, warp, lane,
                                             check != check) &&
            __any_sync(0xffffffffu, check != check))
          exact_pixels<Config>(args, item.n, oc, p, q, lane);
      } else {
        Sm90Epilogue<Config>::store(y_map, result, shared.staging(4 * warpgroup + warp), item.n, oc, p, q, lane);
        if (__any_sync(0xffffffffu, check != check)) {
          if (lane == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
          __syncwarp();
          exact_pixels<Config>(args, item.n, oc, p, q, lane);
        }
      }
    }
    if constexpr (L::kMarch) {
      release_chunk();
      if constexpr (!L::kResidentWeights) release_weights();
    }
  }
  if constexpr (Config::kSplitChannels) split.end(warpgroup);
  if (lane == 0) cute::tma_store_wait<0>();
}

template <class Config>
CUTLASS_DEVICE void separable2d_sm90(Arguments const& args, cute::TmaDescriptor const& x_map, cute::TmaDescriptor const& y_map,
                                     cute::TmaDescriptor const& x_unit_map, cute::TmaDescriptor const& weight_map, char* raw) {
  using L = Sm90Layout<Config>;
  Sm90Shared<Config> const shared(raw);
  int const warpgroup = cutlass::canonical_warp_group_idx();
  if (threadIdx.x == 0) {
    shared.initialise();
    cute::prefetch_tma_descriptor(&x_map);
    cute::prefetch_tma_descriptor(&y_map);
    if constexpr (L::G::kTurned) cute::prefetch_tma_descriptor(&x_unit_map);
    if constexpr (!L::P::kPacked) cute::prefetch_tma_descriptor(&weight_map);
  }
  __syncthreads();
  await_grid_before();
  admit_next_grid();
  if (warpgroup == L::kWarpgroups) {
    cutlass::arch::warpgroup_reg_dealloc<L::kProducerRegisters>();
    int const warp = cutlass::canonical_warp_idx_sync() % 4;
    if (threadIdx.x == 128 * L::kWarpgroups) produce<Config>(args, x_map, x_unit_map, weight_map, shared);
    if constexpr (L::kFillsTaps)
      if (warp > 0) help<Config>(args, shared, warp - 1, cutlass::canonical_lane_idx());
  } else {
    cutlass::arch::warpgroup_reg_alloc<L::kConsumerRegisters>();
    consume<Config>(args, y_map, shared, warpgroup);
  }
}

}  // namespace cutlass_sep
