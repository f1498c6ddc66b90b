// Finds the steps of a training program in the stream of its ops, without the program's help, and follows them.
// Not here: recording (engine/), what to do with a step (plan/).
// Threads: one. Cost: constant per op, amortised; memory 40 bytes per op of the last two periods plus 8 per op of each
// remembered sequence.
//
// Note [How steps are found]
// Learning. A period P is found when the last P ops equal the P before them. Candidates for P are the distances to the
// latest earlier occurrence of the same few ops: some ops occur once a step (the embedding, the loss), and there the
// distance is the step. Equality of the two windows is one comparison of rolling hashes. Equal blocks inside a step
// repeat too, so a period must also bring the live bytes back to where they were, let them rise and fall by a good part
// of what was ever seen, and contain a write to a parameter if the program makes any. Ops whose shapes vary from step
// to step are compared by name only when the exact comparison finds nothing. The boundary is put where few bytes are
// live and where the ops before it occur only once in the period: those few ops, the *end signature*, are from then on
// what ends a step, however long it was and whatever shapes it had. Following. Whole steps are remembered by the hashes
// of their ops. A new step is expected to be the latest remembered one that begins like it; where it departs, another
// remembered one with the same beginning takes over, if there is one. After a stretch that belongs to no step
// (evaluation, warm-up) the beginning of a remembered step is recognised when it has run for kJoinOps ops.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <unordered_map>
#include <vector>

#include "memfit/core/bytes.h"

namespace memfit::trace {

class SequenceDetector {
 public:
  struct Options {
    std::uint32_t longest_period = 1u << 20;  // ops; the memory of learning
    std::uint32_t shortest_period = 4;        // shorter repetitions are loops inside a step
    std::uint32_t remembered = 16;            // sequences kept, the least recently seen goes first
  };
  struct Observation {
    std::uint64_t hash = 0;         // of op name and input shapes (Op::hash)
    std::uint64_t kind = 0;         // of the op name alone
    Bytes live;                     // before the op
    bool writes_parameter = false;  // overwrites something that the optimizer owns
  };
  /// What the op just fed means.
  struct Verdict {
    bool step_ended = false;                 // it was the last op of a step
    std::uint32_t length = 0;                // of the step that ended, in ops
    std::uint32_t seen = 0;                  // how often exactly this step has been seen, this time included
    std::optional<std::uint32_t> ended;      // the remembered sequence that the ended step is (its id)
    std::optional<std::uint32_t> following;  // the sequence that the running step is following, if any
    std::uint32_t position = 0;              // index of the op just fed within that sequence
  };
  static constexpr std::uint32_t kJoinOps = 8;

  SequenceDetector() : SequenceDetector(Options{}) {}
  explicit SequenceDetector(const Options& options);

  Verdict feed(const Observation& op);
  /// The program says that a step ends here, after the op fed last. From the first such call on, only such calls end
  /// steps.
  Verdict end_step();

  /// What the next step will be if it is like the latest: the id of the most recently completed sequence.
  std::optional<std::uint32_t> expected() const;
  /// Length of a remembered sequence; 0 when it is forgotten.
  std::uint32_t length(std::uint32_t sequence) const;
  bool learned() const { return explicit_ || signature_.has_value(); }
  void forget_everything();
  /// What is fed next begins in the middle of something.
  void leave_step();

 private:
  struct Past {
    std::uint64_t hash, kind;
    std::uint64_t hash_sum, kind_sum;  // rolling sums up to and including this op
    std::uint64_t live;
    std::uint32_t parameter_writes;  // up to and including this op
  };
  struct Sequence {
    std::uint32_t id = 0;
    std::uint32_t seen = 0;
    std::uint64_t last_seen = 0;
    std::vector<std::uint64_t> prefix;  // prefix[i]: rolling sum of the first i+1 ops
    std::uint64_t join = 0;             // sum of its first join_ops
    std::uint32_t join_ops = 0;         // so many that they come nowhere else in it; 0: there is no such number
  };

  void learn();
  bool windows_equal(std::uint64_t period, bool by_kind) const;
  bool breathes(std::uint64_t period);
  bool choose_signature(std::uint64_t period);
  Verdict finish_step();
  void follow(Verdict& verdict);
  const Sequence* find(std::uint32_t id) const;
  void find_join(Sequence& sequence);
  const Sequence* matching(std::size_t position, std::uint64_t sum) const;
  const Past& past(std::uint64_t index) const { return history_[index - first_]; }
  std::uint64_t window_sum(std::uint64_t begin, std::uint64_t end, bool by_kind) const;  // of ops begin .. end-1
  std::uint64_t power(std::uint64_t exponent);
  std::size_t longest_remembered() const;

  Options options_;
  std::deque<Past> history_;
  std::uint64_t first_ = 0, count_ = 0;                                    // index of history_.front(), ops fed so far
  std::unordered_map<std::uint64_t, std::uint64_t> latest_, latest_kind_;  // few ops -> index of their last one
  std::vector<std::uint64_t> powers_{1};
  std::uint64_t next_look_ = 0, most_live_ = 0, least_live_ = ~0ull;

  struct Signature {
    std::uint64_t sum = 0;  // rolling sum by kind of the last `length` ops
    std::uint32_t length = 0;
    std::uint64_t period = 0;  // ops between two of its occurrences when it was found
  };
  std::optional<Signature> signature_;
  bool explicit_ = false;

  std::vector<std::uint64_t> running_;  // rolling sums of the running step
  bool begun_at_boundary_ = false;
  std::vector<Sequence> sequences_;
  std::uint32_t next_id_ = 0;
  std::uint64_t clock_ = 0;
  std::optional<std::uint32_t> following_, latest_ended_;
  std::uint32_t position_ = 0;
};

}  // namespace memfit::trace
