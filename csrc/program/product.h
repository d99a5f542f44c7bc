// The products of a program: all lanes of a thread times packed weights.
#pragma once

#include "program/operations.h"
#include "runtime/scratch.h"
#include "scan/lanes.h"

namespace raglane::RAGLANE_TARGET {

// A packed weight: the panels of its groups are consecutive.
template <class A> struct PackedWeight {
  Panels<A> panels;  // of the first group
  int64_t groups;
  const A* from;
  int64_t strides[3];

  void place(const CodeWeight& weight, const raglane_tensor& tensor) {
    panels = {nullptr, weight.rows, weight.depth, 1, panel_vectors};
    groups = weight.groups, from = (const A*)tensor.data;
    for (int i = 0; i < 3; i++) strides[i] = tensor.strides[i];
  }
  int64_t size() const { return groups * panels.size(); }
  int64_t count() const { return groups * panels.count(); }
  int64_t columns() const { return groups * panels.columns; }
  const A* at(int64_t panel) const {
    return panels.at(panel % panels.count()) + panel / panels.count() * panels.size();
  }

  // Pack one panel of a weight with any strides: a backward program reads the forward program's weight transposed.
  void pack(int64_t panel) {
    const A* matrix = from + panel / panels.count() * strides[0];
    Panels<A> own = panels;
    own.data += panel / panels.count() * panels.size();
    panel %= panels.count();
    if (strides[2] == 1) own.pack_transposed(&matrix, panel, strides[1]);
    else if (strides[1] == 1) own.pack_straight(matrix, panel, panel + 1, strides[2]);
    else pack_scattered(own, matrix, panel);
  }

 private:
  [[gnu::noinline]] void pack_scattered(const Panels<A>& own, const A* matrix, int64_t panel) {
    int64_t first = panel * own.panel_columns(), columns = own.units_in(panel) * Panels<A>::width;
    A* to = (A*)own.at(panel);
    for (int64_t k = 0; k < own.depth; k++)
      for (int64_t i = 0; i < columns; i++)
        *to++ = first + i < own.columns ? matrix[(first + i) * strides[1] + k * strides[2]] : (A)0;
  }
};

// Set the memory of all weights.
template <class A> void place_weights(const Code& code, PackedWeight<A>* weights, A* memory) {
  for (int64_t w = 0; w < code.weights; w++) {
    weights[w].panels.data = memory;
    memory += weights[w].size();
  }
}

// The part of one thread in packing all weights.
template <class A> void pack_weights(const Code& code, PackedWeight<A>* weights, int thread, int threads) {
  for (int64_t w = 0; w < code.weights; w++)
    for (int64_t panel = thread; panel < weights[w].count(); panel += threads) weights[w].pack(panel);
}

// The weights after the header of packed ones, which no function writes to; without them `own`.
template <class A> A* packed_weights(const void* packed, A* own) {
  return packed ? (A*)((const unsigned char*)packed + sizeof(PackedHeader)) : own;
}

template <class A> struct LaneProduct {
  At to, start, from;
  const PackedWeight<A>* weight;
  const CodeInstruction* instruction;
  bool to_whole;     // the last group's last vectors may be stored whole
  bool start_whole;  // vectors of the start may be loaded beyond a group
  int64_t next;      // if the start is an element's row: bytes to the row of the next step; otherwise 0
};

// The part of one member of `count` products of lanes [0, active), which have one weight, and differ in their places: so
// the weight is read once for all. Alternately forward and backward over the panels, because those that were read last
// are still in the cache. `fetches`: the panel that follows is fetched meanwhile.
template <class A>
void multiply_lanes(const LaneProduct<A>* products, int count, A* const* rows, int active, const Team& team,
                    bool backwards, bool fetches) {
  constexpr int width = Lanes<A>::width;
  const PackedWeight<A>& weight = *products->weight;
  const Panels<A>& panels = weight.panels;
  const bool is_spread = products->start.step == 0;
  const int64_t first_panel = weight.count() * team.member / team.members;
  const int64_t end_panel = weight.count() * (team.member + 1) / team.members;
  static constexpr int64_t adjacent[panel_vectors] = {0, width, 2 * width, 3 * width}, same[panel_vectors] = {};
  for (int64_t i = first_panel; i < end_panel; i++) {
    const int64_t at = backwards ? first_panel + end_panel - 1 - i : i, group = at / panels.count(), panel = at % panels.count();
    const int vectors = panels.units_in(panel);
    const int64_t begin = panel * panels.panel_columns(), rest = panels.columns - begin;
    const int64_t column = group * panels.columns + begin;
    const int real = (int)(rest < vectors * width ? rest : vectors * width);
    const bool is_full = real == vectors * width, is_last = group == weight.groups - 1;
    const int64_t depth_begin = group * panels.depth * products->from.step;
    const A* next = fetches && i + 1 < end_panel ? weight.at(at + (backwards ? -1 : 1)) : nullptr;
    const LaneProduct<A>* product = products;
    int lane = 0;
    for (int first = 0, size; first < active * count; first += size) {
      size = next_tile(active * count - first, vectors);
      alignas(64) A memory[tile_rows][panel_vectors * width];
      const A *from[tile_rows], *start[tile_rows];
      A *to[tile_rows], *copied[tile_rows];  // `copied`: the place of a row that is computed in `memory`
      for (int r = 0; r < size; r++) {
        from[r] = row_of(product->from, rows, lane) + depth_begin;
        start[r] = row_of(product->start, rows, lane);
        if (product->next != 0)
          for (int v = 0; v < vectors; v++)
            __builtin_prefetch((const unsigned char*)(start[r] + column + v * width) + product->next);
        to[r] = row_of(product->to, rows, lane) + column, copied[r] = nullptr;
        if (!is_full && !(product->to_whole && is_last)) copied[r] = to[r], to[r] = memory[r];
        if (is_spread) {
          store(memory[r], splat_at(start[r]));
          start[r] = memory[r];
        } else if (is_full || product->start_whole) {
          start[r] += column;
        } else {
          by_vectors<A>(real, [&](int64_t c, int n) RAGLANE_INLINE_LAMBDA {
            store(memory[r] + c, load(start[r] + column + c, n));
          });
          start[r] = memory[r];
        }
        if (++lane == active) lane = 0, product++;
      }
      Product<A> tile = {from, weight.at(at), panels.depth, start, is_spread ? same : adjacent, to, adjacent,
                         products->from.step};
      multiply<A>(size, vectors, tile.fetch(next, first, size, active * count, vectors));
      for (int r = 0; r < size; r++)
        if (copied[r])
          by_vectors<A>(real, [&](int64_t c, int n) RAGLANE_INLINE_LAMBDA {
            store(copied[r] + c, load(memory[r] + c), n);
          });
    }
  }
}

}  // namespace raglane::RAGLANE_TARGET
