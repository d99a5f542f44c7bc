// What was chosen for speed alone: where one way to do the work ends and another begins, and how much is done at a time.
//
// Each line ends with the measurement behind it; docs/performance.md has where and how. (B, H, D): sequences, hidden
// size, input size. Bits of outputs depend on none of it. Bits of gradients depend on those that say so: they set the
// order of a sum, or who makes it.
#pragma once

#include <stdint.h>

namespace raglane::tuning {

// ---- threads ----------------------------------------------------------------------------------------------------

inline constexpr double thread_operations = 4e6;   // work that is worth the start of a thread; not measured
inline constexpr double row_operations = 40;       // what a number from memory costs, in operations; not measured
inline constexpr double counted_gates = 3;          // of an element-wise cell, whichever it is; not measured
inline constexpr int64_t thread_bytes = 256 << 10; // bytes of rows to move that are worth a thread; not measured
inline constexpr int spins = 200;                  // a thread that waits gives up its core after so many; not measured

// From so many rows a thread, each has lanes of its own; with fewer, threads form teams. At (64, 256, 256) lanes of its
// own took the backward loop from 6.7 to 5.4 ms; one sequence at H 512 took 6.7 ms with a team, 12.3 without.
inline constexpr double own_rows = 3;
inline constexpr double team_rows = 6;                // that a team should have; not measured
inline constexpr double fewest_rows = 0.1;            // that are counted with, so that teams end somewhere; not measured
inline constexpr int64_t team_weights = 128 << 10;    // bytes that must be read in a step to be worth a wait; not measured

// ---- lanes ------------------------------------------------------------------------------------------------------

inline constexpr int most_lanes = 48;       // of a team; 96 gained nothing
inline constexpr int64_t least_most = 12;   // lanes that are allowed however small the cache is; not measured
inline constexpr double lane_surplus = 1.15;  // lanes beyond what the average length asks for; not measured
inline constexpr int64_t lanes_of_cache = 2;  // their state takes one part in so many of a core's cache; not measured

// ---- input products -----------------------------------------------------------------------------------------------

// Input products are folded into the loop from so many rows on, else prepared: folding took 10.5 to 9.4 ms at (64, 256,
// 256), equal lengths, where more than 24 rows are alive.
inline constexpr double fold_rows = 24;
inline constexpr double fold_rows_cached = 4;       // the same where a core's cache holds the weights; not measured
inline constexpr int64_t weights_of_cache = 2;      // it holds them if they take one part in so many; not measured
inline constexpr int64_t most_products = int64_t(256) << 20;  // bytes in scratch: a bound of memory, not of time

// Rows that are multiplied together, and a chunk of the element-wise loops. Gradients of biases and recurrent factors are
// summed chunk by chunk: their bits depend on it. With it a training forward of an element-wise cell takes 1.03 to 1.22
// times torch's product alone; others were not measured.
inline constexpr int block_rows = 96;
inline constexpr int64_t chunk_of_cache = 4;  // a chunk's products take one part in so many of a core's cache; not measured
inline constexpr int fetch_ahead = 8;     // k's that a product fetches weights ahead; not measured

// Results go past the caches where they take more than so many times one: saved gates 20.3 to 18.7 ms at (48, 128, 64), 160
// steps each; element-wise cells of three gates gained 3 to 8 %, minGRU lost 2 to 3 %.
inline constexpr int64_t streamed_caches = 8;

// ---- element-wise cells ---------------------------------------------------------------------------------------------

// A group of sequences has about so many elements, and there are about so many groups. Gradients of biases and recurrent
// factors are summed group by group: their bits depend on both. Not measured.
inline constexpr int64_t group_elements = 256;
inline constexpr int64_t most_groups = 128;
inline constexpr int64_t lopsided = 2;  // a group with one part in so many of a thread's work is shared; not measured

// ---- gradients of values and weights --------------------------------------------------------------------------------

// Up to so many elements, with so many weights in a direction, the kernels make them, which callers ask for: bits depend
// on it. Of a small training step of 500 to 550 microseconds torch's products and sums took 130.
inline constexpr int64_t few_elements = 640;
inline constexpr int64_t few_weights = 100'000;
inline constexpr int unit_tiles = 4;       // tiles of rows that are one piece of work; not measured
inline constexpr int64_t part_depth = 64;  // terms that are summed before the next rows' turn; not measured

// ---- the machine ----------------------------------------------------------------------------------------------------

inline constexpr int64_t unknown_cache = 512 << 10;  // bytes of a core's cache where the system does not say

}  // namespace raglane::tuning
