// Beam search over prefixes of CTC (Graves 2012, section 7.5.3; Hannun et al. 2014), for one sequence.
//
// A prefix is a node of a trie. Its score is the log-probability of all alignments whose labels are the prefix, plus the
// scores of n-grams and bonuses of its tokens. Alignments that end in a blank and in the last token are summed
// separately, and of each kind the best one is kept with its times: a list of pieces, shared between prefixes.
#pragma once

#include <cstring>
#include <unordered_map>

#include "transduction/lattice.h"
#include "transduction/sequences.h"

namespace raglane {

// Return the log-probability of a token after a context, and replace the context by the next.
inline double take_gram(const raglane_search& call, int64_t token, int64_t& context) {
  for (double total = 0;;) {
    const int64_t begin = call.first[context], end = call.first[context + 1];
    if (begin < 0 || begin > end || end > call.grams) fail("first must be offsets of the grams, got others");
    const int64_t place = std::lower_bound(call.tokens + begin, call.tokens + end, token) - call.tokens;
    if (place < end && call.tokens[place] == token) {
      const int64_t next = call.next[place];
      if (next < 0 || next >= call.contexts) fail("next must be a context, got %lld", (long long)next);
      context = next;
      return total + call.gram_log_probs[place];
    }
    const int64_t shorter = call.shorter[context];
    if (shorter < 0 || shorter >= context) fail("tokens of the first context must be all tokens, got fewer");
    total += call.backoff[context], context = shorter;
  }
}

template <class T> class Search {
 public:
  Search(const raglane_search& call, int64_t sequence) : call_(call), sequence_(sequence), stamps_(call.classes) {
    begin();
    Prefix& empty = beam_.emplace_back();
    empty.blank = empty.best_blank = empty.total = 0;
    nodes_[0].place = 0;
  }

  void run(const T* log_probs, int64_t steps) {
    for (int64_t t = 0; t < steps; t++) {
      step(log_probs + t * call_.classes);
      if ((int64_t)(nodes_.size() + pieces_.size()) > room_) {
        load(save());  // frees nodes and pieces that no prefix of the beam uses
        room_ = least_room + 2 * (int64_t)(nodes_.size() + pieces_.size());
      }
    }
  }

  // The record of raglane_find_prefixes().
  std::vector<int64_t> save() const {
    const int64_t count = (int64_t)beam_.size();
    std::vector<int64_t> lengths, record{steps_, count};
    int64_t total = 0;
    for (const Prefix& prefix : beam_) {
      lengths.push_back(0);
      for (int64_t node = prefix.node; node > 0; node = nodes_[node].parent) lengths.back()++;
      total += lengths.back();
    }
    record.resize(2 + 6 * count + 7 * total);
    int64_t *header = record.data() + 2, *tokens = header + 6 * count, at = 0;
    for (int64_t e = 0; e < count; e++) {
      const Prefix& prefix = beam_[e];
      header[e] = lengths[e], at += lengths[e];
      const double numbers[] = {prefix.blank, prefix.label, prefix.best_blank, prefix.best_label, nodes_[prefix.node].scorer};
      for (int64_t k = 0; k < 5; k++) std::memcpy(&header[(k + 1) * count + e], &numbers[k], 8);
      int64_t node = prefix.node, label = prefix.before, blank = prefix.path;
      for (int64_t place = at - 1; node > 0; node = nodes_[node].parent, place--) {
        tokens[place] = nodes_[node].token;
        if (prefix.best_blank > -infinity) put(pieces_[blank], tokens + total + place, total), blank = pieces_[blank].before;
        if (prefix.best_label == -infinity) continue;
        if (place == at - 1) put({-1, prefix.first, steps_, prefix.mass}, tokens + 4 * total + place, total);
        else put(pieces_[label], tokens + 4 * total + place, total), label = pieces_[label].before;
      }
    }
    return record;
  }

  void load(const std::vector<int64_t>& record) {
    const int64_t size = (int64_t)record.size();
    bool fits = size >= 2 && record[0] >= 0 && record[1] >= 0 && record[1] <= (size - 2) / 6;
    int64_t count = fits ? record[1] : 0, total = 0;
    for (int64_t e = 0; e < count && fits; e++)
      fits = record[2 + e] >= 0 && record[2 + e] <= size && (total += record[2 + e]) <= size;
    if (!fits || size != 2 + 6 * count + 7 * total) fail("state must be that of an earlier search, got another");
    begin();
    steps_ = record[0];
    const int64_t *header = record.data() + 2, *tokens = header + 6 * count;
    auto number = [&](int64_t k, int64_t e) {
      double value;
      std::memcpy(&value, &header[k * count + e], 8);
      if (!(value < infinity)) fail("state must contain numbers below inf, got %g", value);
      return value;
    };
    for (int64_t e = 0, at = 0; e < count; at += header[e++]) {
      Prefix prefix;
      prefix.blank = number(1, e), prefix.label = number(2, e);
      prefix.best_blank = number(3, e), prefix.best_label = number(4, e);
      if (header[e] == 0) prefix.label = prefix.best_label = -infinity;  // no token, no piece
      prefix.total = log_sum(prefix.blank, prefix.label);
      const int64_t end = at + header[e];
      int64_t context = call_.begin;
      for (int64_t place = at; place < end; place++) {
        const int64_t token = tokens[place];
        if (token < 0 || token >= call_.classes || token == call_.blank)
          fail("state must contain tokens of log_probs, got %lld", (long long)token);
        // A context depends on the last tokens only.
        if (call_.order && place >= end - call_.order + 1) take_gram(call_, token, context);
        prefix.node = child(prefix.node, token);
        prefix.path = add(get(prefix.path, tokens + total + place, total));
        const Piece label = get(prefix.before, tokens + 4 * total + place, total);
        if (place < end - 1) prefix.before = add(label);
        else prefix.first = label.first, prefix.mass = label.mass;
      }
      Node& node = nodes_[prefix.node];
      if (node.place >= 0) fail("state must contain different prefixes, got one twice");
      node.place = e, node.scorer = number(5, e), node.context = context;
      beam_.push_back(prefix);
    }
  }

 private:
  struct Node {
    int64_t parent, token, place = -1;  // the place in the beam, or -1
    double scorer = 0;                  // of n-grams and bonuses
    int64_t context = 0;                // of the next token's n-gram
  };
  // A token of an alignment: its steps, and the sum of its probabilities over these.
  struct Piece {
    int64_t before, first, end;
    double mass;
  };
  struct Prefix {
    int64_t node = 0;
    double blank = -infinity, label = -infinity;            // all alignments by their end
    double best_blank = -infinity, best_label = -infinity;  // the best of each
    double total = -infinity;                               // log_sum(blank, label)
    int64_t path = -1;                                      // the pieces of the best that ends in a blank
    int64_t before = -1, first = 0;  // of the best that ends in the last token, the pieces before, and its first step
    double mass = 0;
  };
  // A prefix of the next step: one of the beam, unchanged (token -1) or with one more token.
  struct Candidate {
    double score;
    int64_t prefix, token;
    double all, added;  // of an extension: log-probability of its alignments, and score of n-grams and bonuses
    int64_t context;
    bool operator<(const Candidate& other) const {  // is better
      if (score != other.score) return score > other.score;
      return prefix != other.prefix ? prefix < other.prefix : token < other.token;
    }
  };
  static constexpr int64_t least_room = 1 << 20;

  const raglane_search& call_;
  const int64_t sequence_;
  int64_t steps_ = 0, room_ = least_room, stamp_ = 0;
  std::vector<Node> nodes_;
  std::unordered_map<int64_t, int64_t> children_;
  std::vector<Piece> pieces_;
  std::vector<Prefix> beam_, kept_, next_;
  std::vector<int64_t> closed_, heads_, siblings_, ids_, stamps_;
  std::vector<Candidate> best_;  // a heap with the worst in front

  void begin() {
    nodes_.assign(1, {-1, -1}), nodes_[0].context = call_.begin;
    children_.clear(), pieces_.clear(), beam_.clear();
  }

  int64_t child(int64_t parent, int64_t token) {
    auto [found, is_new] = children_.try_emplace(parent * call_.classes + token, (int64_t)nodes_.size());
    if (is_new) nodes_.push_back({parent, token});
    return found->second;
  }

  int64_t add(const Piece& piece) { return pieces_.push_back(piece), (int64_t)pieces_.size() - 1; }
  static void put(const Piece& piece, int64_t* to, int64_t total) {
    to[0] = piece.first, to[total] = piece.end;
    std::memcpy(to + 2 * total, &piece.mass, 8);
  }
  static Piece get(int64_t before, const int64_t* from, int64_t total) {
    Piece piece{before, from[0], from[total], 0};
    std::memcpy(&piece.mass, from + 2 * total, 8);
    return piece;
  }

  // The pieces of the best alignment of a prefix, whose last token ends before this step.
  int64_t ended(int64_t e) {
    const Prefix& prefix = beam_[e];
    if (prefix.best_blank >= prefix.best_label) return prefix.path;
    if (closed_[e] < 0) closed_[e] = add({prefix.before, prefix.first, steps_, prefix.mass});
    return closed_[e];
  }

  // Add the alignments in which a token begins after prefix e: only after a blank if it repeats the last token.
  void start(int64_t e, int64_t token, double log_prob, Prefix& to) {
    const Prefix& prefix = beam_[e];
    const bool repeats = nodes_[prefix.node].token == token;
    to.label = log_sum(to.label, (repeats ? prefix.blank : prefix.total) + log_prob);
    const double best = (repeats ? prefix.best_blank : std::max(prefix.best_blank, prefix.best_label)) + log_prob;
    if (!(best > to.best_label)) return;
    to.best_label = best, to.before = repeats ? prefix.path : ended(e), to.first = steps_, to.mass = std::exp(log_prob);
  }

  bool is_full() const { return (int64_t)best_.size() == call_.beam; }

  void offer(const Candidate& candidate) {
    if (candidate.score == -infinity || (is_full() && !(candidate < best_.front()))) return;
    if (is_full()) std::pop_heap(best_.begin(), best_.end()), best_.back() = candidate;
    else best_.push_back(candidate);
    std::push_heap(best_.begin(), best_.end());
  }

  // Offer the prefixes of the beam after a step without a new token.
  void keep(const T* log_probs) {
    const int64_t count = (int64_t)beam_.size();
    kept_.assign(beam_.begin(), beam_.end());
    closed_.assign(count, -1), heads_.assign(count, -1), siblings_.resize(count);
    best_.clear();
    const double blank = log_probs[call_.blank];
    for (int64_t e = 0; e < count; e++) {
      Prefix& prefix = kept_[e];
      const Node& node = nodes_[prefix.node];
      prefix.blank = prefix.total + blank;
      prefix.path = ended(e);
      prefix.best_blank = std::max(prefix.best_blank, prefix.best_label) + blank;
      if (node.token >= 0) {
        const double log_prob = log_probs[node.token];
        prefix.label += log_prob, prefix.best_label += log_prob, prefix.mass += std::exp(log_prob);
        const int64_t parent = nodes_[node.parent].place;
        if (parent >= 0) {
          siblings_[e] = heads_[parent], heads_[parent] = e;
          start(parent, node.token, log_prob, prefix);
        }
      }
      prefix.total = log_sum(prefix.blank, prefix.label);
      offer({prefix.total + node.scorer, e, -1, 0, 0, 0});
    }
  }

  // Set ids_ to the tokens that may extend a prefix, the likeliest first.
  void choose(const T* log_probs) {
    double cutoff = call_.least;
    int64_t most = call_.tokens_per_step;
    if (is_full()) {
      double highest = -infinity;
      for (const Prefix& prefix : beam_) highest = std::max(highest, prefix.total + nodes_[prefix.node].scorer);
      const double needed = best_.front().score - highest - call_.bonus;
      // Rounding must not exclude a token; exact scores are compared later.
      cutoff = std::max(cutoff, needed - 1e-6 * (1 + std::abs(needed)));
    }
    // Only so many can be in the next beam: others follow in the same prefix, are in the beam, or repeat its last.
    if (!call_.order) most = std::min(most, call_.beam + (int64_t)beam_.size() + 1);
    ids_.clear();
    for (int64_t c = 0; c < call_.classes; c++) {
      if (log_probs[c] < cutoff) continue;
      if (!(log_probs[c] < infinity))
        fail("log_probs must be numbers below inf, got %g in sequence %lld", (double)log_probs[c], (long long)sequence_);
      if (c != call_.blank && log_probs[c] > -infinity) ids_.push_back(c);
    }
    auto likelier = [&](int64_t a, int64_t b) { return log_probs[a] != log_probs[b] ? log_probs[a] > log_probs[b] : a < b; };
    if ((int64_t)ids_.size() > most) {
      std::nth_element(ids_.begin(), ids_.begin() + most, ids_.end(), likelier);
      ids_.resize(most);
    }
    std::sort(ids_.begin(), ids_.end(), likelier);
  }

  // Offer each prefix of the beam with each chosen token.
  void extend(const T* log_probs) {
    for (int64_t e = 0; e < (int64_t)beam_.size(); e++) {
      const Prefix& prefix = beam_[e];
      const Node& node = nodes_[prefix.node];
      const double added = node.scorer + call_.bonus;
      stamp_++;
      for (int64_t other = heads_[e]; other >= 0; other = siblings_[other]) stamps_[nodes_[beam_[other].node].token] = stamp_;
      for (int64_t c : ids_) {
        const double likely = prefix.total + log_probs[c];
        if (is_full() && likely + added < best_.front().score) break;
        if (stamps_[c] == stamp_) continue;  // the prefix is in the beam
        Candidate candidate{0, e, c, c == node.token ? prefix.blank + log_probs[c] : likely, added, node.context};
        if (call_.order) candidate.added += call_.weight * take_gram(call_, c, candidate.context);
        candidate.score = candidate.all + candidate.added;
        offer(candidate);
      }
    }
  }

  void step(const T* log_probs) {
    keep(log_probs);
    choose(log_probs);
    extend(log_probs);
    std::sort(best_.begin(), best_.end());
    for (const Prefix& prefix : beam_) nodes_[prefix.node].place = -1;
    next_.clear();
    for (const Candidate& candidate : best_) {
      if (candidate.token < 0) {
        next_.push_back(kept_[candidate.prefix]);
        continue;
      }
      Prefix& prefix = next_.emplace_back();
      start(candidate.prefix, candidate.token, log_probs[candidate.token], prefix);
      prefix.total = prefix.label;
      prefix.node = child(beam_[candidate.prefix].node, candidate.token);
      // A node that is only a part of longer prefixes, after load(), has neither.
      nodes_[prefix.node].scorer = candidate.added, nodes_[prefix.node].context = candidate.context;
    }
    beam_.swap(next_);
    for (size_t e = 0; e < beam_.size(); e++) nodes_[beam_[e].node].place = (int64_t)e;
    steps_++;
  }
};

}  // namespace raglane
