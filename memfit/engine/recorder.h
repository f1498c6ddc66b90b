// Records training steps while the program runs: which op read and made which bytes, how long it took, and when the
// program let go of them. The latest whole step becomes a trace::Step. Not here: the file (engine/recording_file.h),
// where steps end (trace/sequence_detector.h), carrying out a plan. Threads: any; state under the allocator's lock.
// Cost: about 0.6 us an op, 250 bytes of memory an op of two steps.
//
// Note [What is recorded]
//   Ops as they pass the door, views and ops that are made of others left out: the same stream that SequenceDetector is
//   fed. A storage is a block of the allocator; a block that an op took and did not give back is one of its outputs. Of
//   memory that is not the allocator's (numpy, files) nothing is recorded, but an op that reads it cannot be run again.
//   A block of 128 bytes or more that is taken outside every op, and a write through a raw pointer, get an op of their
//   own (its hash is 0, and it is not fed to the detector). What a raw pointer is out to, or what nobody can be seen to
//   read, is pinned. Smaller blocks (the numbers in x * 2), and reads of small pinned values, are left out: the engine
//   keeps a copy with the op. An op that fills a whole storage without reading it (zero_, copy_) makes a new value that
//   overwrites nothing, and the old one dies before it: so it can be run again without the old content. Running
//   statistics of batch norm are left out: a replay does not move them. Under a limit the step is the same: what the
//   program would have done without one. A value whose bytes are evicted goes on under its engine's Value instead of
//   its block, replays' own blocks are not seen, and the engine says what can run again.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/SmallVector.h>
#include <c10/util/flat_hash_map.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>

#include "memfit/engine/detail/step_log.h"
#include "memfit/engine/op_rules.h"
#include "memfit/memory/cpu_allocator.h"
#include "memfit/trace/sequence_detector.h"

namespace memfit::engine {

class Recorder final : public memory::BlockObserver {
 public:
  /// What has been recorded.
  struct Recording {
    /// What the step is.
    enum class Kind {
      Step,      // the latest whole step
      Updates,   // no step repeated: the ops between two rounds of updates of parameters, those with the highest peak
      WholeRun,  // there were no two rounds either: everything from the first op to now
    };
    trace::Step step;
    std::optional<trace::Step> other;   // a step of the same ops on tensors of other sizes: another batch
    Kind kind = Kind::Step;
    std::uint64_t steps = 0;  // of this kind so far
  };

  explicit Recorder(memory::CpuAllocator& allocator);
  ~Recorder() override;
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  bool on() const { return on_; }
  /// Keep a step of another batch size beside the latest, if there is one: for a file. Costs a copy of it at each change of sizes.
  void keep_other_batch() { keep_other_ = true; }
  /// Nothing more is recorded; what there is stays. Not to be undone.
  void stop() noexcept;
  /// Called once, after the third whole step, without a lock: the recording will hardly get better.
  void when_sure(std::function<void()> callback) { when_sure_ = std::move(callback); }
  /// The latest whole step whose sequence of ops was seen at least twice, if there is one, else the latest whole step;
  /// or what Recording::Kind says; nothing when no op ran, or more than kMostOps without repetition and without an
  /// update.
  std::optional<Recording> recording() const;
  std::uint64_t ops() const { return fed_; }
  /// Ticks so far that are none of the program's own: recording, and under a limit searching and replaying.
  std::uint64_t overhead() const;
  /// Time that recording took.
  std::uint64_t spent_ns() const;

  /// One op while it runs, on the stack of the thread that runs it.
  class Running {
   public:
    /// `watched`: the engine looks after raw pointers by itself.
    Running(Recorder& recorder, const OpRule& rule, c10::DispatchKeySet keys, const torch::jit::Stack& stack,
            bool watched = false);
    Running(const Running&) = delete;
    Running& operator=(const Running&) = delete;
    /// An op that threw leaves what it wrote with unknown content.
    ~Running();
    void finish(const torch::jit::Stack& stack);
    /// Under a limit: `kernel_ticks` is what the op itself took, `replayable` whether the engine can run it again.
    void finish(const torch::jit::Stack& stack, std::uint64_t kernel_ticks, bool replayable);

    /// One value among the op's inputs or outputs, in the order in which a trace::Step has them.
    struct Operand {
      std::uint32_t logged;  // its number in the running stretch
      memory::Block* block;
      caffe2::TypeMeta dtype;  // of outputs that were seen as tensors
    };
    const c10::SmallVectorImpl<Operand>& inputs() const { return inputs_; }
    const c10::SmallVectorImpl<Operand>& outputs() const { return outputs_; }
    /// Position of the op in the running step, kNone outside of any. Valid also when the op has ended the step.
    std::uint32_t position() const { return position_; }

   private:
    friend class Recorder;
    struct Used {
      memory::Block* block;
      std::uint64_t birth;
      c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    };
    struct Written {
      memory::Block* block;
      std::uint64_t birth;
      bool blank;
      caffe2::TypeMeta dtype;
    };
    Recorder& recorder_;
    const OpRule& rule_;
    std::uint32_t op_ = 0;
    std::uint32_t epoch_ = 0;
    std::uint64_t serial_ = 0;
    bool linked_ = false;
    bool opaque_ = false, foreign_ = false, pinned_input_ = false, writes_parameter_ = false, writes_kept_ = false;
    std::uint64_t hash_ = 0;
    std::uint64_t own_ = 0, own_peak_ = 0;  // bytes of blocks that it took
    std::uint64_t kernel_ = 0;              // ticks when the kernel began
    c10::SmallVector<Used, 8> used_;
    c10::SmallVector<Written, 4> written_;
    c10::SmallVector<memory::Block*, 8> taken_;
    c10::SmallVector<Operand, 8> inputs_, outputs_;
    std::uint32_t position_ = detail::StepLog::kNone;
    bool watched_;
    Running* outer_ = nullptr;  // of the same thread
    Running* next_ = nullptr;   // of all that run now
  };

  /// What sets an op apart in a sequence: its name, and the dtypes and shapes of its tensors.
  static std::uint64_t hash_of(const OpRule& rule, const torch::jit::Stack& stack);
  /// Position that the next op will have in the running step; kNone when no step is being followed from its beginning.
  std::uint32_t next_position() const;

  /// A step that has just ended.
  struct StepEnd {
    std::uint32_t sequence = 0;  // SequenceDetector's number
    std::uint32_t seen = 0;
    bool whole = false;  // it is what recording() gives
  };
  /// Adds what each op of the latest step took to `ticks`, if that has an element for each.
  void add_op_ticks(std::vector<std::uint64_t>& ticks) const;
  /// Since the last call. The engine asks after each op.
  std::optional<StepEnd> take_step_end() { return std::exchange(step_end_, std::nullopt); }
  /// The sequence that the step after the latest one will likely be.
  std::optional<std::uint32_t> expected() const { return detector_.expected(); }

  // Under a limit a value loses its block and gets another.
  void evicted(memory::Block* block, const void* value) noexcept;
  void restored(const void* value, memory::Block* block) noexcept;
  void dropped_while_evicted(const void* value, std::uint64_t bytes) noexcept;
  /// What is in `block` cannot be made again from now on.
  void lost(memory::Block* block) noexcept;
  /// A replayed kernel runs: what its workers allocate is none of the program's.
  void set_replaying(bool on) { replaying_ = on; }

  /// An op made of others that come by on their own, but that may read its arguments unseen.
  void custom_op(const OpRule& rule, const torch::jit::Stack& stack);
  /// A raw pointer to the bytes of `storage` has been taken outside an op.
  void raw_access(c10::StorageImpl* storage);

  // memory::BlockObserver
  void taken(memory::Block* block) noexcept override;
  void given(memory::Block* block) noexcept override;

  /// Steps longer than half of this are not found, runs longer than this not recorded as a whole.
  static constexpr std::uint32_t kMostOps = 1u << 18;

 private:
  /// What is known of a live block.
  struct Entry {
    std::uint64_t birth = 0;
    std::uint32_t epoch = 0;  // of the log that `value` belongs to
    std::uint32_t value = 0;
    std::uint32_t storage = 0;
    std::uint32_t locks = 0;    // ops that use it now
    std::uint64_t seen_by = 0;  // serial number of the latest op that has it among its arguments
    std::uint8_t flags = 0;     // StepLog::ValueFlag that stay with the storage
  };

  void use(Running& run, const at::Tensor& tensor, bool written, bool hidden, bool opaque = false);
  void use_storage(Running& run, const at::Tensor& tensor, memory::Block* block, bool written, bool opaque);
  void note_leaf(const at::Tensor& tensor, Entry& entry, bool written);
  Entry& entry_of(memory::Block* block);
  Entry* find(memory::Block* block, std::uint64_t birth);
  std::uint32_t value_of(std::uint64_t bytes, Entry& entry);
  void note_death(Entry& entry, std::uint64_t bytes);
  void mark(Entry& entry, std::uint8_t flags);
  void shape_value(std::uint32_t value, const at::Tensor& tensor);
  std::uint32_t new_output(memory::Block* block, std::uint32_t op, std::uint8_t flags);
  void unseen_block(memory::Block* block);
  trace::Replay replay_of(const Running& run);
  void begin(Running& run, c10::DispatchKeySet keys, const torch::jit::Stack& stack);
  void end(Running& run, const torch::jit::Stack* stack, std::uint64_t ticks);
  void end_writes(Running& run);
  void release(Running& run);
  void sample(const Running& run);
  void end_results(Running& run, const torch::jit::Stack& stack, std::uint32_t first_output);
  void unlink(Running& run);
  void feed(std::uint32_t op);
  void look_back();
  void end_step(const trace::SequenceDetector::Verdict& verdict);
  bool other_batch(std::uint32_t begin) const;
  trace::Step cut_whole() const;
  void start_log();
  trace::SequenceDetector::Observation observation(const detail::StepLog::Op& op) const;
  void forget();
  bool trains(std::uint32_t begin, std::uint32_t end) const;
  std::uint32_t begin_of_last(std::uint32_t fed, std::uint32_t end) const;
  static void arm(c10::StorageImpl* storage);
  static std::uint64_t hash_tensor(std::uint64_t hash, const at::Tensor& tensor);

  memory::CpuAllocator& allocator_;
  memory::Lock& lock_;
  bool on_ = true;
  std::function<void()> when_sure_;
  bool sure_ = false, told_ = false;

  detail::StepLog log_;  // the running stretch
  std::uint32_t epoch_ = 1;
  std::uint32_t next_storage_ = 0;
  bool from_start_ = true;                          // log_ has everything since the first op
  ska::flat_hash_map<const void*, Entry> entries_;  // by block, or by the engine's Value while it has none
  Running* running_ = nullptr;

  struct Whole {
    detail::StepLog log;
    std::uint32_t epoch = 0, begin = 0, end = 0;
    std::uint64_t end_ticks = 0, end_recorder = 0;  // 0: not known before the next op begins
    std::uint32_t seen = 0;
  };
  Whole whole_;  // the latest whole step; whole_.end == 0 without one
  std::optional<trace::Step> other_;
  bool keep_other_ = false;
  std::uint64_t steps_ = 0;
  trace::SequenceDetector detector_;
  bool began_backward_ = false, updates_ = false;  // in the run so far
  std::uint64_t fed_ = 0;
  std::uint64_t serial_ = 0;
  std::uint64_t spent_ = 0;                            // ticks
  std::uint32_t step_begin_ = detail::StepLog::kNone;  // in log_: first op of the running step
  bool at_boundary_ = false;                           // a step has ended and the next has not begun
  bool replaying_ = false;
  std::optional<StepEnd> step_end_;
  std::uint64_t op_thread_ = 0, random_thread_ = 0;
  bool several_op_threads_ = false, several_random_threads_ = false;
};

}  // namespace memfit::engine
