// The engine: keeps tensors under the allocator's limit by dropping those that can be made again and making them
// again, bit for bit, before an op needs them.
// Not here: public API (engine/session.h), where ops come from (engine/door.h), what an op is (engine/op_rules.h).
// Threads: any. Note [Two locks]
//   The allocator's recursive lock guards ledger, values and recipes; what holds it is short. While a replayed kernel
//   runs it is lent out: the kernel's own workers allocate, and an allocation may have to evict. The turn keeps replays
//   apart: one thread at a time begins or ends an op or brings values back. Order: turn, then the allocator's lock.
//   Dropping storages and making room need no turn; what a replay needs is locked (Value::locks) meanwhile.
// Cost: about 0.3 us an op without limit, about 1 us with one.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_set>
#include <vector>

#include "memfit/engine/door.h"
#include "memfit/engine/planned_steps.h"
#include "memfit/engine/recorder.h"
#include "memfit/engine/value.h"
#include "memfit/memory/cpu_allocator.h"
#include "memfit/trace/run_status.h"

namespace memfit::engine {

/// What the engine did so far. Exact counts.
struct EngineStats {
  std::uint64_t ops = 0;
  std::uint64_t recorded = 0;
  std::uint64_t evictions = 0;
  std::uint64_t evicted_bytes = 0;
  std::uint64_t recomputed_ops = 0;
  std::uint64_t recompute_ns = 0;
  std::uint64_t engine_ns = 0;  // time in bookkeeping while a limit holds, searching included
  std::uint64_t search_ns = 0;  // time choosing what to evict
  std::uint64_t scored = 0;
  std::uint64_t raw_accesses = 0;  // values pinned since a raw pointer got out
  std::uint64_t raw_faults = 0;    // evicted values brought back by a raw read
  std::uint64_t refusals = 0;
  std::uint64_t verified = 0;
  std::uint64_t planned_steps = 0;  // that followed a plan from the first op to the last
  std::uint64_t replanned = 0;      // plans made again, since the first did not fit what happened
  std::uint64_t plan_misses = 0;    // instructions that did not find what they foresaw
  std::uint64_t packed = 0;         // values kept in a short form instead of their bytes
  std::uint64_t offload_write_bytes = 0, offload_read_bytes = 0;
  std::uint64_t plan_ns = 0;         // time in the planner
  std::uint64_t predicted_peak = 0;  // of the latest plan
  std::uint64_t predicted_step_ns = 0;
  std::uint64_t step_ns = 0;  // median of the latest steps that ended, planner's time left out
};

class Engine final : public memory::MemoryPressure {
 public:
  static Engine& instance();

  /// Start watching. `verify`: check recomputed bytes against checksums of the originals.
  void start(const std::string& door, bool verify, trace::RunStatus* status);
  /// Tensor byte limit, 0 for none. Returns the old one.
  std::uint64_t set_limit(std::uint64_t bytes);
  /// Limit of the process's resident memory, 0 for none: what is not tensors is measured as the program runs, the rest
  /// is the tensors' budget.
  void set_memory_limit(std::uint64_t bytes);
  /// `bytes` of memory that is no tensor are about to be taken: tensors make room. Never throws.
  void before_other_memory(std::uint64_t bytes) noexcept;
  /// Tensors may be moved to files in `folder`, at most `limit` bytes (0: what is free there). Before the first limit.
  /// Throws: UsageError when the folder cannot serve.
  void set_offload(const std::string& folder, Bytes limit);
  /// Nothing more goes there. What is there comes back when it is used.
  void close_offload();
  /// Steps that come again run by plan. Default: yes. Takes effect with the next limit.
  void set_planning(bool on) { planning_wanted_ = on; }
  bool started() const { return started_; }
  bool has_evicted() const { return evicted_count_ != 0; }
  std::uint64_t ops() const { return ops_.load(std::memory_order_relaxed); }
  Door door() const { return door_; }
  const EngineStats& stats() const { return stats_; }
  /// Record steps from now on, as long as there is no limit. Before the first op and before any limit is set.
  Recorder& start_recording();
  /// nullptr when nothing is or was recorded.
  Recorder* recorder() const { return recorder_.get(); }
  /// Counters into the status page.
  void publish() noexcept;

  void run_op(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::DispatchKeySet rest,
              torch::jit::Stack* stack);

  // memory::MemoryPressure
  bool make_room(std::uint64_t bytes) override;
  bool keep_dropped(memory::Block* block) noexcept override;
  [[noreturn]] void refuse(std::uint64_t bytes) override;

  /// Whoever begins or ends an op, or brings values back. See Note [Two locks].
  struct Turn {
    explicit Turn(Engine& engine) : turn(engine.turn_), lock(engine.lock_) {}
    std::lock_guard<std::recursive_mutex> turn;
    std::lock_guard<memory::Lock> lock;
  };

  /// A raw pointer into `storage` is taken outside an op: bring its bytes back, pin them, cut what reads them.
  void raw_access(c10::StorageImpl* storage);
  /// A raw read hit the stand-in address of an evicted value. True: readable now.
  bool raw_fault(void* address);
  void dropped_while_evicted(Value* value) noexcept;
  void dropped_outside(Value* value, std::uint64_t bytes, c10::DataPtr&& original) noexcept;
  void before_fork();
  void after_fork_in_child();

  void check_invariants();
  std::size_t live_values() const { return value_count_; }
  std::size_t live_recipes() const { return recipe_count_; }

 private:
  Engine();
  struct Call;

  // recording (engine.cpp)
  void begin(Call& call, const torch::jit::Stack& stack);
  void collect(Call& call, const torch::jit::Stack& stack);
  void collect_tensor(Call& call, const at::Tensor& tensor, std::uint32_t arg, int element, bool written, bool hidden);
  void keep_state(Call& call);
  void keep_older_than(std::uint64_t sequence);
  void prepare_writes(Call& call);
  void prepare_recipe(Call& call, const torch::jit::Stack& stack);
  void finish(Call& call, const torch::jit::Stack& stack);
  void finish_writes(Call& call);
  void abandon(Call& call) noexcept;
  void unlock_all(Call& call) noexcept;
  void run_recorded(const c10::OperatorHandle& op, const OpRule& rule, c10::DispatchKeySet keys,
                    c10::DispatchKeySet rest, torch::jit::Stack* stack);
  bool recording() const { return recorder_ != nullptr && recorder_->on(); }
  void run_escaping(const c10::OperatorHandle& op, const OpRule& rule, c10::DispatchKeySet rest,
                    torch::jit::Stack* stack);
  void run_locked(const c10::OperatorHandle& op, const OpRule& rule, c10::DispatchKeySet rest,
                  torch::jit::Stack* stack);
  NumericContext numeric_context() const;

  // values (values.cpp)
  Value* value_of(c10::StorageImpl* storage, bool create);
  Value* new_value(std::uint64_t bytes);
  void bind(Value* value, memory::Block* block, c10::StorageImpl* storage);
  void unbind(Value* value);
  void mark_unused(Value* value);
  void release_if_unused(Value* value);
  void drain_unused();
  void add_reader(TensorArg& arg, Recipe* recipe, Value* value);
  void remove_reader(TensorArg& arg);
  void destroy(Recipe* recipe);
  void make_source(Value* value);
  bool available(const Value* value) const { return value->resident || value->recipe != nullptr || value->spare; }
  /// Bytes that a replay left, of a value that no storage holds: they may go at any time.
  static bool is_temporary(const Value* value) {
    return !value->bound && value->held && value->recipe != nullptr && value->locks == 0 && value->references == 0;
  }
  void cut_readers(Value* value);
  struct Dependents {
    std::vector<Value*> evicted;   // that a storage waits for
    std::vector<Value*> resident;  // nearest ones that have their bytes
  };
  template <class AtRecipe, class AtResult>
  void walk_dependents(Value* value, AtRecipe at_recipe, AtResult at_result);
  Dependents dependents_of(Value* value);
  static std::uint64_t bytes_of(const std::vector<Value*>& values);
  bool worth_keeping(Value* value);
  void before_content_is_lost(Value* value, bool may_copy);
  void keep_resident_dependents(Value* value);
  void restore_dependents(Value* value);
  c10::DataPtr copy_of(Value* value, const void* bytes);
  void hold(Value* value, c10::DataPtr&& data);
  void hold_copy(Value* value);
  Value* snapshot(Value* value);
  void drop_held(Value* value);
  bool release_retained(std::uint64_t bytes);
  void arm(Value* value);
  static void arm(c10::StorageImpl* storage);
  void disarm(c10::StorageImpl* storage);

  // eviction (evictor.cpp)
  void update_candidate(Value* value);
  bool evictable(const Value* value) const;
  bool evict_one();
  double score(Value* value, bool closely);
  void enqueue(Value* value, double score);
  void note_bring_cost(Value* value) noexcept;
  void evict(Value* value);
  void refill_queue();

  // replay (replay.cpp)
  void restore(const std::vector<Value*>& targets);
  bool restore_at_once(const std::vector<Value*>& targets);
  static bool inputs_present(const Recipe* recipe);
  void restore_frugally(const std::vector<Value*>& targets, std::size_t most_replays);
  struct Frugal;
  void bring(Value* value, Frugal& frugal);
  void restore(Value* value) { restore(std::vector<Value*>{value}); }
  void restore_blank(Value* value);
  struct Pass;
  bool shed(Pass& pass, std::size_t position, const std::vector<Value*>& targets);
  void replay(Pass& pass, Recipe* recipe);
  at::Tensor tensor_for(Pass& pass, TensorArg& arg);
  void take_result(Pass& pass, Recipe* recipe, std::size_t index, const c10::Storage& storage);
  void settle(Value* value, c10::DataPtr&& data);
  void check_bytes(Value* value, Recipe* recipe);
  void run_replayed(Recipe* recipe, torch::jit::Stack& stack);
  void note_random_thread(const OpRule& rule);

  // plans (plan_execution.cpp)
  void start_planning();
  void stop_planning();
  void before_planned(const OpRule& rule, const torch::jit::Stack& stack);
  void begin_recorded(std::optional<Recorder::Running>& running, const OpRule& rule, c10::DispatchKeySet keys,
                      const torch::jit::Stack& stack);
  void after_planned(const Recorder::Running& run);
  void carry_out(std::span<const plan::Instruction> list);
  void drop_planned(Value* value, std::vector<Value*>& made);
  void replay_planned(const plan::Instruction& instruction, std::vector<Value*>& made);
  void let_go(Value* value);
  struct Unlock;
  void pack_planned(trace::ValueId id);
  void move_planned(const plan::Instruction& instruction);

  // copies elsewhere (spare.cpp)
  bool pack(Value* value, caffe2::TypeMeta dtype, std::uint64_t capacity);
  bool start_leaving(Value* value);
  bool finish_leaving(Value* value);
  void start_arriving(Value* value);
  void finish_arriving(Value* value);
  void finish_moves();
  bool keep_outside(Value* value);
  void fetch(Value* value);
  void drop_spare(Value* value) noexcept;
  double outside_cost(const Value* value) const;
  void end_planned_step(const Recorder::StepEnd& end, std::uint32_t position);
  bool needs_change(const PlannedStep& planned, bool followed) const;
  void leave_outside(const std::vector<Value*>& values);
  void note_op_times(PlannedStep& planned, std::uint64_t program_ticks);
  void make_plan(std::uint32_t sequence);
  void change_plan(PlannedStep& planned);
  void refine(PlannedStep& planned);
  bool search_plan(PlannedStep& planned);
  void note_prediction(const PlannedStep& planned);
  void note_step_time(std::uint64_t ticks);

  memory::CpuAllocator& allocator_;
  memory::Lock& lock_;
  std::recursive_mutex turn_;
  bool started_ = false;
  bool verify_ = false;
  bool forked_ = false;
  std::atomic<bool> limited_{false};
  Door door_ = Door::Fake;
  trace::RunStatus* status_ = nullptr;
  std::unique_ptr<Recorder> recorder_;
  EngineStats stats_;
  std::atomic<std::uint64_t> ops_{0};
  std::uint64_t sequence_ = 0;      // ops of the program
  std::uint64_t clock_ = 0;         // ops of the program and replays
  std::uint64_t last_update_ = 0;   // sequence of the last op that updated state
  std::uint64_t update_round_ = 0;  // sequence of the first op of the last round of updates
  std::uint64_t op_thread_ = 0;
  bool several_op_threads_ = false;
  std::uint64_t visit_ = 0;
  std::size_t value_count_ = 0;
  std::size_t recipe_count_ = 0;
  std::atomic<std::size_t> evicted_count_{0};
  std::vector<Value*> candidates_;
  std::vector<Value*> unused_;
  bool draining_ = false;
  struct Queued {
    Value* value;
    std::uint64_t last_use;
    double score;
  };
  std::vector<Queued> queue_;
  std::vector<Recipe*> score_walk_;
  std::uint64_t queue_clock_ = 0;
  std::size_t queue_size_ = 0;
  std::uint64_t random_state_ = 0x9E3779B97F4A7C15ull;
  std::vector<Value*> retained_;
  std::unordered_set<Recipe*> threadbound_;  // random ops whose kernel takes the default generator
  std::uint64_t random_thread_ = 0;
  bool several_random_threads_ = false;
  std::uint64_t tensor_limit_ = 0;
  std::atomic<std::uint64_t> memory_limit_{0};
  std::uint64_t other_memory_ = 0;  // highest resident bytes seen that are not tensors
  std::uint64_t measure_other() noexcept;
  void apply_limits() noexcept;
  void limit_changes(bool on);
  int attempts_ = 0;  // above 0: a refusal is not final
  std::size_t last_region_ = 0;
  std::unique_ptr<OffloadStore> offload_;                      // nullptr: nowhere to go
  std::vector<std::unique_ptr<OffloadStore>> offload_stores_;  // earlier ones
  bool offload_full_ = false;                                  // nothing more goes there
  std::vector<Value*> moving_;                                 // whose copies are being written or read
  bool planning_wanted_ = true;
  bool planning_ = false;  // the recorder is there for plans
  bool recording_to_file_ = false;
  bool want_plan_ = false;  // something has been evicted: steps are to be recorded from now on
  PlannedSteps planned_;
  std::uint64_t online_bytes_ = 0;   // asked of the online policy while the running step followed a plan
  std::uint64_t step_began_ = 0;     // ticks; 0: no step has ended yet
  std::uint64_t unplanned_ops_ = 0;  // since the latest one that followed a plan
  std::uint64_t step_overhead_ = 0;  // Recorder::overhead() then
  std::vector<std::uint64_t> step_ticks_;
};

}  // namespace memfit::engine
