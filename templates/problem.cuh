// What every kernel of the separable operator takes at run time, and the shape arithmetic that follows from its compile-time constants.
#pragma once

namespace cutlass_sep {

/// Run-time arguments. The problem's other numbers are constants of `Config` (the translation unit states them).
struct Arguments {
  void const* x;           // [N,C,H,W] in the layout of Config, or packed (half_operands.cuh)
  void const* dw_weight;   // [C,1,KH,KW]
  void const* pw_weight;   // [O,C]
  void const* dw_bias;     // [C] or null
  void const* pw_bias;     // [O] or null
  void* y;                 // [N,O,P,Q] in the layout of Config
  void* workspace;         // packed weights, see pack_weights.cuh; null if the kernel takes them as they are
  // Of the block that this kernel is a part of, else null:
  void const* block_x;        // x of the block, in the layout of Config: what kResidual adds to y, and what exact_block.cuh starts from
  void const* expand_weight;  // [kC,kExpandC]; kExpandC = 0: exact_block.cuh is not needed
  void const* expand_bias;    // [kC] or null
  int n, h, w, p, q;       // P, Q: output height and width
  int pad_top, pad_left;
  int steps;               // warpgroup tiles that lie below each other in a work item (separable2d_sm90.cuh); of runs, rows of the map under one
};

/// Threads of a block of pack_weights, the small launch before the main kernels.
inline constexpr int kPackThreads = 256;

CUTLASS_HOST_DEVICE constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
CUTLASS_HOST_DEVICE constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }

/// How the pixels and channels of a tile are dealt to MMA rows, MMA columns and threads.
///
/// The depthwise output of a pixel is a row of the pointwise GEMM's A operand. Lane (g = lane / 4, t = lane % 4) of a warp holds MMA rows
/// g and g + 8 of each 16-row block. Which pixel a row is and which channel a column is are free: both are chosen so that a lane owns
/// adjacent pixels (a sliding window over x) and reads x without bank conflicts. Where tensor cores make the depthwise outputs (kMmaQ > 0,
/// diagonal_depthwise.cuh), the 16 rows of a block are kMmaQ pixels of each of 16 / kMmaQ image rows in their order. `Config::kPixelMajor` says that
/// shared memory holds x as [pixel][channel] and not as [channel][pixel]; `Config::kChannelsLast` speaks of global memory. What is contiguous
/// there and pixel-major here is turned in between (turn_rows.cuh).
template <class Config>
struct Geometry {
  using Element = typename Config::Element;
  static constexpr int kElementBytes = sizeof(Element);
  /// Channels of one step of the depthwise stage, and of one lane in it: 8 bytes of x.
  static constexpr int kLaneChannels = 8 / kElementBytes;
  static constexpr int kStepChannels = 4 * kLaneChannels;
  /// Channels (k) of one MMA instruction, in steps. The split form multiplies fp16 parts, 16 channels at a time.
  static constexpr int kInstructionSteps = Config::kSplit ? 2 : 1;
  static constexpr int kInstructionChannels = kInstructionSteps * kStepChannels;
  static constexpr int kInstructions = Config::kMmaSteps / kInstructionSteps;  // issued together
  static constexpr bool kTensorDepthwise = Config::kMmaQ > 0;
  static constexpr bool kTurned = kTensorDepthwise && !Config::kChannelsLast;
  /// Whether tiles are runs: consecutive pixels of the map, across the ends of its rows. Then (p, q) of a tile is (0, pixel of the map).
  static constexpr bool kRuns = Config::kRunWindow > 0;
  CUTLASS_DEVICE static int map_p(Arguments const& args) { return kRuns ? 1 : args.p; }
  CUTLASS_DEVICE static int map_q(Arguments const& args) { return kRuns ? args.p * args.q : args.q; }
  /// Pixels of one lane: across and down.
  static constexpr int kLaneQ = Config::kPixelMajor ? 2 : 2 * Config::kBlocks;
  static constexpr int kLaneP = Config::kPixelMajor ? Config::kBlocks : 1;
  /// Pixels of one warp.
  static constexpr int kBlocksQ = kTurned ? Config::kBlocks : 1;  // tensor cores: blocks side by side, for wide stores
  static constexpr int kWarpQ = kTensorDepthwise ? kBlocksQ * Config::kMmaQ : 8 * kLaneQ;
  static constexpr int kWarpP = kTensorDepthwise ? Config::kBlocks * 16 / kWarpQ : kLaneP;
  /// Within the warp's pixels, row and column of the pixel in MMA row g + 8h of block b. The column is one of block 0 where blocks lie side by side.
  CUTLASS_HOST_DEVICE static constexpr int pixel_p(int b, int h) {
    int const down = b / kBlocksQ;
    return kTensorDepthwise && Config::kMmaQ == 8 ? 2 * down + h : down;
  }
  CUTLASS_HOST_DEVICE static constexpr int pixel_q(int g, int h) {
    return !kTensorDepthwise ? kLaneQ * g + h : Config::kMmaQ == 8 ? g : g + 8 * h;
  }
  /// Rows and columns of x under the `p` rows or `q` columns of pixels, and under a lane's.
  static constexpr int window_rows(int p) { return (p - 1) * Config::kStrideH + (Config::kKernelH - 1) * Config::kDilationH + 1; }
  static constexpr int window_cols(int q) { return (q - 1) * Config::kStrideW + (Config::kKernelW - 1) * Config::kDilationW + 1; }
  static constexpr int kWindowP = (kWarpP - 1) * Config::kStrideH + (Config::kKernelH - 1) * Config::kDilationH + 1;
  static constexpr int kWindowQ = (kLaneQ - 1) * Config::kStrideW + (Config::kKernelW - 1) * Config::kDilationW + 1;
  static constexpr int kTaps = Config::kKernelH * Config::kKernelW;
  /// Passes over the channels, `Config::kSlotChannels` at a time.
  static constexpr int kChunks = ceil_div(Config::kC, Config::kSlotChannels);
  static constexpr int kOcTiles = ceil_div(Config::kO, Config::kTileOc);

  /// Channel, within its step, of lane column t and its value j.
  CUTLASS_HOST_DEVICE static constexpr int channel_of(int t, int j) {
    return Config::kPixelMajor ? kLaneChannels * t + j : t + 4 * j;
  }
  /// Channel, within its instruction, of MMA column k. 16-bit A fragments hold columns 2t, 2t+1, 2t+8, 2t+9 (in the split form the last
  /// two come from the second step); TF32 ones t, t+4. Where tensor cores make the depthwise outputs, columns are channels.
  CUTLASS_HOST_DEVICE static constexpr int channel_of_k(int k) {
    static_assert(!kTensorDepthwise);
    if (Config::kSplit) return k / 8 * kStepChannels + channel_of(k % 8 / 2, k % 2);
    return kElementBytes == 4 ? channel_of(k % 4, k / 4) : channel_of(k % 8 / 2, k / 8 * 2 + k % 2);
  }
};

}  // namespace cutlass_sep
