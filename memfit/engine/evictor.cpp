// Which value to evict: cheapest to bring back for the bytes it frees, and not needed soon.
// The search is bounded: when values are many a sample is scored, and one scoring serves several evictions.
#include <algorithm>
#include <cmath>

#include "memfit/core/bytes.h"
#include "memfit/engine/detail/ticks.h"
#include "memfit/engine/engine.h"
#include "memfit/engine/out_of_budget.h"

#include <fmt/format.h>

namespace memfit::engine {
namespace {
constexpr std::uint64_t kMinEvictedBytes = 128;
constexpr std::uint64_t kLeastOffloaded = 16 << 10;  // below it a file's latency is not worth it
constexpr std::size_t kScoredAtOnce = 192;           // candidates scored for one queue
constexpr std::size_t kQueue = 16;                   // evictions one scoring serves at most
constexpr std::size_t kMany = 2048;
constexpr std::uint64_t kQueueAge = 24;   // ops after which a scoring is stale; more for a longer queue
constexpr std::size_t kRoughNodes = 48;   // recipes counted when adding up what bringing back costs, at first
constexpr std::size_t kFewestNodes = 12;  // for values of a few hundred bytes
constexpr std::size_t kNodes = 2048;      // and of those that are next to go
constexpr std::uint64_t kLookAge = 64;    // ops for which such a closer look counts
// Bytes that a replay left go before those that the program will ask for.
constexpr double kTemporary = 0.3;
// A value written in place so often is a sum in the making: it is needed again with each term.
constexpr std::uint32_t kManyWrites = 6;
constexpr double kNever = HUGE_VAL;         // score of what cannot go
constexpr double kReplayOverheadNs = 2500;  // of one replayed op, beside its kernel
}  // namespace

bool Engine::evictable(const Value* value) const {
  if (!value->resident || value->escaped || value->outside || value->bytes < kMinEvictedBytes ||
      !(value->bound || value->held))
    return false;
  if (value->recipe != nullptr) return true;
  return value->spare || (offload_ && value->bytes >= kLeastOffloaded);
}

void Engine::update_candidate(Value* value) {
  const bool wanted = evictable(value);
  if (wanted == (value->candidate >= 0)) return;
  if (wanted) {
    value->candidate = static_cast<std::int32_t>(candidates_.size());
    candidates_.push_back(value);
    return;
  }
  Value* last = candidates_.back();
  candidates_[static_cast<std::size_t>(value->candidate)] = last;
  last->candidate = value->candidate;
  candidates_.pop_back();
  value->candidate = -1;
  if (value->queued) {
    value->queued = false;
    queue_.erase(std::find_if(queue_.begin(), queue_.end(), [&](const Queued& q) { return q.value == value; }));
  }
}

// Nanoseconds to bring `value` back, for each of its bytes: its own op, and whatever of its inputs has no bytes.
// Evicted inputs that a storage still holds will be brought back anyway, so they weigh less than ghosts, which are made
// for this alone. The walk is bounded, more so for small values; where it ends, the dearest of what is left counts with
// what it was known to cost.
double Engine::score(Value* value, bool closely) {
  ++stats_.scored;
  const double age = static_cast<double>(clock_ - value->last_use) + 1;
  // Values used a moment ago are likely used again in a moment; beyond that, age says little.
  double weight = (age < 4 ? 8.0 : age < 16 ? 2.0 : 1.0) / static_cast<double>(value->bytes);
  if (!value->bound) weight *= kTemporary;
  if (value->writes >= kManyWrites) weight *= value->writes;
  if (!closely && value->looked != 0 && clock_ - value->looked < kLookAge) return value->bring_cost * weight;
  if (value->recipe == nullptr) {
    if (!value->spare && offload_full_) return kNever;
    value->prefers_outside = true;
    return (value->spare && !offload_ ? 0 : outside_cost(value)) * weight;
  }
  const std::size_t most = closely ? std::clamp<std::size_t>(value->bytes / 16, kFewestNodes, kNodes)
                                   : std::clamp<std::size_t>(value->bytes / 64, kFewestNodes, kRoughNodes);
  const std::uint64_t id = ++visit_;
  std::vector<Recipe*>& walk = score_walk_;
  walk.clear();
  walk.push_back(value->recipe);
  value->recipe->visit = id;
  double cost = 0;
  double beyond = 0;
  for (std::size_t i = 0; i < walk.size(); ++i) {
    Recipe* recipe = walk[i];
    bool shared = false;
    if (i > 0) {
      for (const Value* r : recipe->results) shared = shared || (r != nullptr && r->bound && !r->resident);
    }
    cost += (static_cast<double>(recipe->cost_ns) + kReplayOverheadNs) * (shared ? 0.5 : 1.0);
    for (std::uint32_t k = 0; k < recipe->tensor_count; ++k) {
      const Value* input = recipe->tensors[k].value;
      if (input == nullptr || input->resident || input->spare || input->recipe == nullptr || input->recipe->visit == id)
        continue;
      if (walk.size() == most) {
        beyond = std::max(beyond, static_cast<double>(input->bring_cost));
        continue;
      }
      input->recipe->visit = id;
      walk.push_back(input->recipe);
    }
  }
  cost += beyond;
  value->prefers_outside = offload_ && !offload_full_ && value->block != nullptr && value->bytes >= kLeastOffloaded &&
                           outside_cost(value) < cost;
  if (value->prefers_outside) cost = outside_cost(value);
  value->bring_cost = static_cast<float>(cost);
  if (closely) value->looked = clock_;
  return cost * weight;
}

void Engine::note_bring_cost(Value* value) noexcept {
  if (value->recipe == nullptr) return;
  double beyond = 0;
  for (std::uint32_t k = 0; k < value->recipe->tensor_count; ++k) {
    const Value* input = value->recipe->tensors[k].value;
    if (input != nullptr && !input->resident) beyond = std::max(beyond, static_cast<double>(input->bring_cost));
  }
  value->bring_cost = static_cast<float>(beyond + static_cast<double>(value->recipe->cost_ns) + kReplayOverheadNs);
}

// Best at the end.
void Engine::enqueue(Value* value, double s) {
  const auto place =
      std::lower_bound(queue_.begin(), queue_.end(), s, [](const Queued& q, double x) { return q.score > x; });
  queue_.insert(place, Queued{value, value->last_use, s});
  value->queued = true;
}

void Engine::refill_queue() {
  for (const Queued& q : queue_) q.value->queued = false;
  queue_.clear();
  queue_clock_ = clock_;
  const std::size_t n = candidates_.size();
  // Thousands of values are small ones: which of them goes matters less than how long it takes to say.
  queue_size_ = n > kMany         ? std::min<std::size_t>(n / 64, 256)
                : n <= 4 * kQueue ? std::max<std::size_t>(1, n / 8)
                                  : kQueue;
  const std::size_t keep = queue_size_;
  const std::size_t scored = n > kMany ? 2 * keep : std::min(n, kScoredAtOnce);
  for (std::size_t i = 0; i < scored; ++i) {
    std::size_t index = i;
    if (n > kScoredAtOnce) {
      random_state_ ^= random_state_ << 13;
      random_state_ ^= random_state_ >> 7;
      random_state_ ^= random_state_ << 17;
      index = random_state_ % n;
    }
    Value* value = candidates_[index];
    if (value->locks != 0 || value->queued) continue;
    const double s = score(value, false);
    if (s == kNever || (queue_.size() == keep && s >= queue_.front().score)) continue;
    enqueue(value, s);
    if (queue_.size() > keep) {
      queue_.front().value->queued = false;
      queue_.erase(queue_.begin());
    }
  }
}

bool Engine::evict_one() {
  for (int attempt = 0; attempt < 3; ++attempt) {
    if (queue_.empty() || clock_ - queue_clock_ > kQueueAge * queue_size_ / kQueue) refill_queue();
    if (queue_.empty()) break;
    const double worst = queue_.front().score;
    while (!queue_.empty()) {
      const Queued next = queue_.back();
      queue_.pop_back();
      next.value->queued = false;
      if (next.value->locks != 0 || next.value->last_use != next.last_use || next.value->candidate < 0) continue;
      // A closer look: its walk may have ended too early, and evictions since then may have made it dear.
      if (score(next.value, true) > 2 * worst) continue;
      evict(next.value);
      if (!next.value->resident) return true;
    }
  }
  // The sample may have held only locked values.
  Value* best = nullptr;
  double best_score = 0;
  for (Value* value : candidates_) {
    if (value->locks != 0) continue;
    const double s = score(value, false);
    if (s == kNever || (best != nullptr && s >= best_score)) continue;
    best = value;
    best_score = s;
  }
  if (best == nullptr) return false;
  evict(best);
  return !best->resident;
}

bool Engine::make_room(std::uint64_t bytes) {
  const std::uint64_t t0 = detail::ticks();
  const std::uint64_t live = allocator_.ledger().live;
  bool freed = false;
  if (planning_ && !recording()) want_plan_ = true;
  if (planned_.current() != nullptr) online_bytes_ += bytes;
  while (live - allocator_.ledger().live < bytes && evict_one()) freed = true;
  if (!freed && attempts_ == 0) freed = release_retained(bytes);
  const std::uint64_t spent = detail::ticks() - t0;
  detail::thread_state.engine_ticks += spent;
  stats_.search_ns += detail::ticks_to_ns(spent);
  return freed;
}

void Engine::refuse(std::uint64_t bytes) {
  if (attempts_ > 0) throw OutOfBudget("memfit: another way is tried", Bytes());
  std::uint64_t evictable_bytes = 0;
  for (const Value* v : candidates_) {
    if (v->locks == 0) evictable_bytes += v->bytes;
  }
  const memory::Ledger& ledger = allocator_.ledger();
  const Bytes least(ledger.live - evictable_bytes + bytes);
  ++stats_.refusals;
  std::string holders;
  for (const auto& h : allocator_.holders_at_peak()) {
    if (holders.size() > 300) break;
    holders += fmt::format("{}{} by {}", holders.empty() ? "" : ", ", format_bytes(Bytes(h.bytes)),
                           h.op.empty() ? "the program" : h.op);
  }
  const std::uint64_t limit = allocator_.limit();
  const std::string asked = fmt::format("memfit: {} asked for {} in op {}", memory::set_current_op(""),
                                        format_bytes(Bytes(bytes)), sequence_);
  const std::string held = fmt::format(
      "of what is live {} could be made again and has been or is in use now, the rest is parameters, state, inputs and "
      "what was written by hand. ",
      format_bytes(Bytes(evictable_bytes)));
  const std::string others = memory_limit_ == 0
                                 ? ""
                                 : fmt::format("Of --memory {}, {} are not tensors. ",
                                               format_bytes(Bytes(memory_limit_.load())), format_bytes(Bytes(other_memory_)));
  std::string text;
  if (limit != 0 && ledger.live + bytes > limit) {
    text = fmt::format(
        "{}, and it does not fit. Limit {} = live {} + headroom {}; {}{}Largest holders: {}. The smallest limit that gets "
        "past this point is about {}: --tensor-memory {}B.",
        asked, format_bytes(Bytes(limit)), format_bytes(Bytes(ledger.live)), format_bytes(Bytes(limit) - Bytes(ledger.live)),
        held, others, holders, format_bytes(least), least.count());
  } else {
    text = fmt::format(
        "{}, and the device ({}) has not so much left, although {}. Live are {}; {}Largest holders: {}. Give the device to "
        "this program alone, or make the model or the batch smaller.",
        asked, allocator_.device().name(),
        limit == 0 ? "no limit is set: with one, tensors are evicted" : "the limit of " + format_bytes(Bytes(limit)) + " allows it",
        format_bytes(Bytes(ledger.live)), held, holders);
  }
  if (status_ != nullptr) {
    status_->least_limit_bytes = least.count();
    status_->ops_at_last_refusal = ops_.load();
    trace::set_text(status_->message, text);
    publish();
  }
  throw OutOfBudget(text, least);
}

}  // namespace memfit::engine
