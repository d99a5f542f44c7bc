// Decides which blocks of a program may share memory.
#pragma once

#include "program/code.h"

namespace raglane::RAGLANE_TARGET {

inline bool is_state(const Code& code, const Place& place) {
  return place.block >= 0 && code.block[place.block].kind == RAGLANE_STATE;
}

// An output, or a state's next value, that is a local and nothing else.
inline bool is_all_of(const Code& code, const CodeOutput& output, int64_t local) {
  return output.place.block == local && output.place.start == 0 && !output.place.spread &&
         output.width == code.block[local].width;
}

// A local may share the memory of another block if no column of that block is read after the local's is written.
inline bool may_share(const Code& code, int64_t local, int64_t other) {
  struct Read {
    int64_t instruction, begin, end;
    bool is_beside;  // each column is read when its replacement is written
  };
  constexpr int most = 24;
  Read reads[most];
  int count = 0;
  auto note = [&](const Place& place, int64_t columns, int64_t instruction, bool each) {
    if (place.block != other) return;
    bool all = columns < 0;
    if (count < most)
      reads[count] = {instruction, all ? 0 : place.start,
                      all ? code.block[other].width : place.start + columns, each};
    count++;
  };
  for (int64_t i = 0; i < code.instructions; i++) {
    const CodeInstruction& by = code.instruction[i];
    OperationFacts facts = facts_of_operation(by.operation);
    for (int o = 0; o < facts.operands; o++)
      note(by.operands[o], by.operation == RAGLANE_OF_GATHER ? -1 : columns_of(by, o, code.weight), i,
           facts.each && by.operands[o].spread == RAGLANE_ADJACENT);
  }
  for (int64_t o = 0; o < code.outputs + code.states; o++)
    if (o >= code.outputs || !is_state(code, code.output[o].place))  // outputs of states are copied first
      note(code.output[o].place, code.output[o].place.spread ? 1 : code.output[o].width, code.instructions, false);
  if (count > most) return false;
  for (int64_t i = 0; i < code.instructions; i++) {
    const CodeInstruction& by = code.instruction[i];
    for (int r = 0; r < facts_of_operation(by.operation).results; r++) {
      if (by.results[r].block != local) continue;
      int64_t begin = by.results[r].start, end = begin + columns_written(by, r);
      for (const Read* read = reads; read < reads + count; read++) {
        if (read->instruction < i || read->begin >= end || begin >= read->end) continue;
        if (read->instruction > i || !read->is_beside || read->begin != begin) return false;
      }
    }
  }
  return true;
}

}  // namespace raglane::RAGLANE_TARGET
