// Rows of x on their way from [channel][pixel] in global memory to [pixel][channel] in shared memory.
//
// TMA brings 64 channels of 64 pixels of a row, a square of 16-bit values, to where the same pixels lie with their channels; warps beside the
// producer then turn it where it lies, 8 x 8 values at a time (ldmatrix, stmatrix transposed). What a row has beside its squares comes 8 pixels at a
// time. From there on x is what a channels_last tensor leaves in shared memory.
#pragma once

namespace cutlass_sep {

/// How the columns of a window are cut. Squares start on a 128-byte line of x for the usual padding and a tile that starts on one.
template <class Config>
struct TurnedColumns {
  using G = Geometry<Config>;
  /// Columns left of a tile's own are as many as its padding, known but for multiples of 8: taken is what is closest to half a kernel.
  static constexpr int kBeside = ((Config::kKernelW - 1) * Config::kDilationW / 2 + Config::kPhase + 4) / 8;
  static constexpr int kLeft = kBeside <= 2 ? kBeside : 0;  // units of 8 columns before the first square
  static constexpr int kMost = 2;                           // units behind the last; more are a square
  CUTLASS_HOST_DEVICE static constexpr int squares(int columns) {
    int const units = ceil_div(columns, 8) - kLeft;
    return units / 8 + (units % 8 > kMost);
  }
  CUTLASS_HOST_DEVICE static constexpr int right(int columns) {
    int const units = ceil_div(columns, 8) - kLeft;
    return units % 8 > kMost ? 0 : units % 8;
  }
  CUTLASS_HOST_DEVICE static constexpr int padded(int columns) { return 8 * (kLeft + 8 * squares(columns) + right(columns)); }
};

/// A row of `Columns` columns as the warps turn it: batches of 8 matrices of 8 x 8 values, each closed under turning.
template <class Config, int Columns>
struct TurnedRow {
  using C = TurnedColumns<Config>;
  static constexpr int kUnitBytes = 8 * 128, kSquareBytes = 64 * 128;
  static constexpr int kSquares = C::squares(Columns), kUnits = C::kLeft + C::right(Columns);
  static_assert(8 * kUnits + 64 * kSquares == Columns);
  static constexpr int kBatches = 8 * kSquares + kUnits;

  CUTLASS_HOST_DEVICE static constexpr int square_offset(int i) { return C::kLeft * kUnitBytes + i * kSquareBytes; }
  /// Byte of the i-th unit beside the squares.
  CUTLASS_HOST_DEVICE static constexpr int unit_offset(int i) { return i * kUnitBytes + (i < C::kLeft ? 0 : kSquares * kSquareBytes); }

  // Where a lane's row of a matrix of the first group lies, and goes; the same of 8 pixels.
  uint32_t load, store, unit_load, unit_store;

  CUTLASS_DEVICE explicit TurnedRow(int lane) {
    // A load or store is of matrices [2][2]; lane l addresses row l % 8 of matrix l / 8. Row r of a matrix of the square lies at 128 r, its unit u
    // at 16 (u ^ r), as TMA's swizzle and ldmatrix have it.
    int const r = lane % 8, m = lane / 8;
    load = m / 2 * 1024 + r * 128 + (m % 2 ^ r) * 16;
    store = m % 2 * 1024 + r * 128 + (m / 2 ^ r) * 16;
    unit_load = lane * 16;
    unit_store = r * 128 + (m ^ r) * 16;
  }

  using Matrices = uint32_t[4];

  CUTLASS_DEVICE static void read(Matrices& matrix, char const* address) {
    cute::SM75_U32x4_LDSM_N::copy(*reinterpret_cast<cute::uint128_t const*>(address), matrix[0], matrix[1], matrix[2], matrix[3]);
  }
  CUTLASS_DEVICE static void write(Matrices const& matrix, char* address) {
    cute::SM90_U16x8_STSM_T::copy(matrix[0], matrix[1], matrix[2], matrix[3], *reinterpret_cast<cute::uint128_t*>(address));
  }

  /// Batch `batch` of the row, by a whole warp.
  CUTLASS_DEVICE void turn(char* row, int batch) const {
    char *from[2], *to[2];
    if (batch < 8 * kSquares) {
      // Of the square's 4 x 4 groups of matrices two at (i, i ^ other): turned, they change places, or stay where `other` is 0.
      char* const square = row + square_offset(batch / 8);
      uint32_t const other = batch % 8 / 2, apart = cute::max(other, 1u), first = batch % 2 * (apart == 1 ? 2 : 1);
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < 2; ++k) {
        uint32_t const i = first ^ k * apart, j = i ^ other;
        from[k] = square + i * 2048 + (load ^ j * 32);
        to[k] = square + j * 2048 + (store ^ i * 32);
      }
    } else {
      // A unit: [channel][8 pixels] becomes [8 pixels][channel].
      char* const unit = row + unit_offset(batch - 8 * kSquares);
      CUTLASS_PRAGMA_UNROLL
      for (uint32_t k = 0; k < 2; ++k) {
        from[k] = unit + k * 512 + unit_load;
        to[k] = unit + (unit_store ^ k * 64);
      }
    }
    Matrices matrix[2];
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < 2; ++k) read(matrix[k], from[k]);
    __syncwarp();
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < 2; ++k) write(matrix[k], to[k]);
  }
};

}  // namespace cutlass_sep
