// Constants chosen only for speed: thresholds between two methods, and sizes of pieces of work.
//
// The comment of each states the measurement; docs/performance.md describes the setup. "One thread" means float32 on
// one core of a Zen 5 with AVX-512 and 1 MB of L2: medians of interleaved calls, in processor time, where differences
// of 3 % are noise. "Two threads" means wall time on two free cores of the same processor. The cost of communication
// between the cores changes from minute to minute, perhaps with the caches they share: "near" and "apart" are the two
// states. (B, H, D): sequences, hidden size, input size. Outputs have the same bits for any values. Some constants set
// the order of a sum of gradients, or who computes it, and so their bits; their comments say so. Constants that follow
// from the number of registers are defined at their use.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace raglane::tuning {

// ---- threads ----------------------------------------------------------------------------------------------------

// Operations from which starting a thread pays. Two threads, calls of 20 to 100 microseconds: 1e6 and 2e6 take 0.78 to
// 1.02 times as long near and 1.00 to 1.32 apart, 8e6 up to 1.22 and 16e6 up to 1.54 near.
inline constexpr double thread_operations = 4e6;
// A step counts at least as this many rows if the weights take more than one part in `weights_of_cache` of a core's cache:
// it lasts as long as reading them. Two threads of a Xeon with 2 MB of L2, one row of an LSTM and a GRU with H from 384
// to 1,024: 0.37 to 0.8 of the time with the thread and the half of the weights that it reads.
inline constexpr double least_rows = 6;
// Cost of a gate of an element-wise cell in addition to its product, in operations. One thread, H 256, lognormal
// lengths: minGRU 52, minLSTM 59, QRNN 67. IndRNN and SRU were not measured.
inline constexpr double row_operations = 40;
// Cost of an instruction of a program per number, in operations. Two threads: 1.5 to 24 take 0.97 to 1.06 times as
// long, without a trend.
inline constexpr double instruction_operations = 6;
// Gates of an element-wise cell in estimates of its work: most cells have 3.
inline constexpr double counted_gates = 3;
// Bytes of moved rows from which starting a thread pays. Two threads: 32 to 128 KB take 0.99 to 1.03 times as
// long, 512 KB up to 1.11, 4 MB up to 1.32.
inline constexpr int64_t thread_bytes = 256 << 10;
// Number of polls of a waiting thread before it yields its core. Two threads, teams: 0 takes 0.99 to 1.08 times
// as long, 20 up to 1.01, 2,000 and 20,000 0.98 to 1.01.
inline constexpr int spins = 200;
// Number of polls of a thread of the library's own pool before it sleeps, 2 ms. Two threads of an AMD EPYC, calls of 0.4
// to 30 ms, against OpenMP's: with 2,000, 1.1 to 1.3 times as long, because the system takes long to wake a sleeping
// core; with 5,000 and more, 0.9 to 1.04. 200,000 without giving up the core slow torch's products down to a half.
inline constexpr int polls = 5000;

// From this many rows per thread, each thread has its own lanes; with fewer, threads form teams. Own lanes:
// the backward loop 6.7 to 5.4 ms at (64, 256, 256). Teams: one sequence at H 512 in 6.7 instead of 12.3 ms.
inline constexpr double own_rows = 3;
// The same in tiles of rows for weights per step that a core's cache does not hold, AMX's if they take more than one
// part in so many of it. Two threads of a Xeon with 2 MB of L2, LSTM at H 512, teams over own lanes: 4.6 rows take 0.86
// of the time in inference and 0.92 in training, 10 rows 1.0; with AMX 4.6 rows 0.77 and 0.82, 10 and 16 rows 0.91 to
// 0.96, and at H 256, where the weights take 0.5 MB, 3.5 rows 0.95 and 7 rows 1.04.
inline constexpr double own_tiles = 1.5;
inline constexpr int64_t held_of_cache_in_tiles = 2;
// The minimum of rows in the estimate of a team, which gets twice the number of rows below which there are teams. Two
// threads, LSTM: instead of 6 rows, 4 take up to 1.13 times as long, 2 up to 1.39, 12 as long.
inline constexpr double fewest_rows = 0.1;
// Bytes of weights per step from which a barrier per step pays. Two threads, LSTM, GRU and RNN, 1 and 4 rows: without
// teams 144 KB take up to 1.39 times as long near, and 0.81 to 0.99 apart; 256 KB 0.84 to 1.41, 1 MB 1.01 to 1.32.
// Teams at 64 KB take 0.77 to 1.49 times as long.
inline constexpr int64_t team_weights = 128 << 10;

// ---- lanes ------------------------------------------------------------------------------------------------------

// Maximum of lanes of a team. 96 gained nothing.
inline constexpr int most_lanes = 48;
// The same with AMX's tiles, of two registers of 16 rows.
inline constexpr int most_lanes_in_tiles = 64;
// Up to this many rows AMX's products are made before the gates, not during them: in bfloat16 and in int8, where one row
// takes the products of vectors. One thread of a Xeon, LSTM: in bfloat16 during them 8 rows take 1.06, 3 rows 1.0 times
// as long and 16 rows 0.85; in int8 1 row 1.06, 3 rows 0.82.
inline constexpr int alone_rows = 8, alone_rows_in_bytes = 1;
// Lanes that a team may have in a cache of any size. One thread, LSTM: at H 1,024 from 6 to 48 lanes take 0.97 to 1.05
// times as long. At H 2,048 24 lanes take 0.89 to 0.92 times as long as 12, 48 take 0.78 to 0.82, and 6 up to 1.16:
// there the time is spent reading weights, so a larger number may be better. It was not raised, because programs, whose
// lanes take more memory, were not measured.
inline constexpr int64_t least_most = 12;
// The lanes' states take one part in this many of a core's cache. One thread, LSTM and GRU: 1, 4 and 8 take 0.97 to
// 1.03 times as long at H from 256 to 1,024, but 8 in training at 1,024 1.06.
inline constexpr int64_t lanes_of_cache = 2;
// Lanes in proportion to the average number of rows. One thread, lognormal lengths, H 128 and 256: 1.0 takes 0.97 to
// 1.02 times as long, 1.3 and 1.6 0.97 to 1.03, 2.5 0.98 to 1.06 (inference 1.01 to 1.06).
inline constexpr double lane_surplus = 1.15;

// ---- input products -----------------------------------------------------------------------------------------------

// From this many rows input products are folded into the loop; with fewer they are prepared. Folded: 10.5 to 9.4 ms at
// (64, 256, 256), equal lengths, with 24 rows or more.
inline constexpr double fold_rows = 24;
// The same for weights that take at most one part in this many of a core's cache. One thread, equal lengths: instead of
// 4 rows, 1 takes 1.03 to 1.16 times as long with 2 or 3 rows; 8 to 24 take 0.96 to 1.06 for 2 to 18 rows,
// without a trend. Instead of one part in 2, all of the cache and one part in 4 and 8 take 0.92 to 1.06.
inline constexpr double fold_rows_cached = 4;
inline constexpr int64_t weights_of_cache = 2;
// Maximum of bytes of input products in scratch: a limit of memory, not of time.
inline constexpr int64_t most_products = int64_t(256) << 20;

// Rows whose products are computed together, and of a chunk of the element-wise loops: gradients of biases and
// recurrent factors are summed chunk by chunk, so their bits depend on it. With it a training forward of an
// element-wise cell takes 1.03 to 1.22 times torch's product; other numbers were not measured.
inline constexpr int block_rows = 96;
// A chunk's products take one part in this many of a core's cache. One thread, H from 256 to 1,024: 1, 2, 8 and 16 take
// 0.92 to 1.06 times as long, without a trend.
inline constexpr int64_t chunk_of_cache = 4;
// Distance in k at which a product prefetches its weights. One thread, panels of 512 KB, 1 to 6 rows: 0 to 32 take 0.98
// to 1.03 times as long.
inline constexpr int fetch_ahead = 8;
// Weights of a step that a core's cache does not hold are fetched into it panel by panel, while all rows are multiplied with
// the panel before. One thread of a Xeon with 2 MB of L2, the products alone, 16 MB of weights: 154 to 185 GF/s with 32 rows
// (201 from L2), 169 to 193 with 48, 127 to 155 with 16, as long with 4. The panels in use and those that follow take at
// most this part of the cache, and longer ones are read in parts of so many k.
inline constexpr double fetched_of_cache = 0.75;
inline constexpr int64_t fetched_depth = 1024;

// Results larger than this many times a core's cache bypass the caches. Saved gates: 20.3 to 18.7 ms at (48,
// 128, 64), 160 steps each. Element-wise cells of three gates gained 3 to 8 %, minGRU lost 2 to 3 %.
inline constexpr int64_t streamed_caches = 8;

// ---- element-wise cells ---------------------------------------------------------------------------------------------

// Approximate minimum of elements of a group of sequences, and maximum of groups: gradients of biases and recurrent
// factors are summed group by group, so their bits depend on both. One thread, H 128 and 256: groups of 64 to 1,024
// elements take 0.94 to 1.04 times as long. Two threads: at most 8 to 2,048 groups take 0.99 to 1.02 times as long.
inline constexpr int64_t group_elements = 256, most_groups = 128;

// ---- programs -------------------------------------------------------------------------------------------------------

// Rows that run instruction after instruction while they are in the nearest cache.
inline constexpr int program_rows = 6;
// Bytes of each matrix of a program that are computed together.
inline constexpr int64_t program_block = 4096;

// ---- gradients of values and weights --------------------------------------------------------------------------------

// Up to this many elements and weights in a direction, callers let the kernels compute them in bfloat16 as well:
// their bits depend on it. Of a small training step of 500 to 550 microseconds torch's products and sums took 130.
inline constexpr int64_t few_elements = 640, few_weights = 100'000;
// Rows of a result whose sums are computed one after the other with the same factor, and terms that are summed before
// the next rows follow. Backward pass of an LSTM with H from 128 to 512, on AVX-512: 12 or 48 rows take up to 6 %
// longer. With copied columns, gradients of weights alone, a Xeon with 2 MB of L2: 64, 256 and 512 terms take 0.95 to
// 1.05 times as long. With the narrow panels of 16 registers (AVX2 on Zen 3, gradients alone, H from 64 to 512): instead
// of 512 terms and 24 rows, 128 and 12 take 1.02 to 1.16 times as long, 48 rows 0.98 to 1.05.
inline constexpr int unit_rows = 24;
inline constexpr int64_t part_depth = 128, part_depth_narrow = 512;
// Distance in k at which such products prefetch numbers that are a row apart, with 16 registers. Zen 3, one thread,
// gradients of weights of an LSTM with H from 128 to 512: 24 takes 0.85 to 0.99 of the time without, 12 0.91 to 0.98.
inline constexpr int rows_ahead = 24;
// Elements whose rows are packed together. 256 or 1,024 take up to 6 % longer.
inline constexpr int64_t gradient_rows = 512;

// ---- memory ---------------------------------------------------------------------------------------------------------

// Bytes from which a block is kept for the next call; glibc keeps smaller ones at no cost. Without the page faults a
// training step of an LSTM is 1.13 times as fast at (64, 256, 256) from 140 steps on, and 1.3 times at (256, 128, 64).
// From 8 MB on, it would be 0.93 to 0.96 times as fast at (32, 128, 128), because offering pages to the system costs
// time.
inline constexpr size_t least_block = 32 << 20;

// ---- the machine ----------------------------------------------------------------------------------------------------

// Bytes of a core's cache if the system does not report it.
inline constexpr int64_t unknown_cache = 512 << 10;

}  // namespace raglane::tuning
