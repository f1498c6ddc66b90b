#include "memfit/trace/sequence_detector.h"

#include <algorithm>

namespace memfit::trace {
namespace {

// Rolling sums modulo 2^64 with an odd base, over hashes that are mixed first.
constexpr std::uint64_t kBase = 0x9e3779b97f4a7c15ull;
constexpr std::uint32_t kFew = 4;  // ops that make a candidate
constexpr std::uint32_t kLongestSignature = 64;
constexpr std::uint32_t kMostJoinOps = 256;
constexpr std::uint64_t kKindEvery = 2;  // comparison by name only needs this many equal windows more
// A program that keeps its last step (its graph, in cycles) until the next one breathes little: a fifth was seen. What
// is a third of the run so far is hardly a loop inside a step.
constexpr double kBreath = 0.5, kShallowBreath = 0.15;
constexpr std::uint64_t kLongPart = 3, kLongLoop = 10000;

std::uint64_t mix(std::uint64_t x) {
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9ull;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

bool alike(std::uint64_t a, std::uint64_t b) {
  const std::uint64_t large = std::max(a, b), small = std::min(a, b);
  return large - small <= large / 64 + 4096;
}

}  // namespace

SequenceDetector::SequenceDetector(const Options& options) : options_(options) {}

std::uint64_t SequenceDetector::power(std::uint64_t exponent) {
  while (powers_.size() <= exponent) powers_.push_back(powers_.back() * kBase);
  return powers_[exponent];
}

std::uint64_t SequenceDetector::window_sum(std::uint64_t begin, std::uint64_t end, bool by_kind) const {
  const Past& last = past(end - 1);
  const std::uint64_t whole = by_kind ? last.kind_sum : last.hash_sum;
  if (begin == 0) return whole;
  const Past& before = past(begin - 1);
  return whole - (by_kind ? before.kind_sum : before.hash_sum) * powers_[end - begin];
}

bool SequenceDetector::windows_equal(std::uint64_t period, bool by_kind) const {
  const std::uint64_t windows = by_kind ? kKindEvery + 1 : 2;
  if (count_ < windows * period || count_ - windows * period <= first_) return false;
  const std::uint64_t sum = window_sum(count_ - period, count_, by_kind);
  for (std::uint64_t w = 1; w < windows; ++w)
    if (window_sum(count_ - (w + 1) * period, count_ - w * period, by_kind) != sum) return false;
  const Past &now = past(count_ - 1), &then = past(count_ - 1 - period);
  if (!by_kind && !alike(now.live, then.live)) return false;
  const bool writes_any = now.parameter_writes > 0;
  return !writes_any || now.parameter_writes > then.parameter_writes;
}

/// A step fills and empties memory; an optimizer's loop over equal parameters or the blocks of an evaluation do not.
bool SequenceDetector::breathes(std::uint64_t period) {
  if (count_ < next_look_) return false;  // looking costs `period`, so not at every op
  next_look_ = count_ + period / 2;
  std::uint64_t least = ~0ull, most = 0;
  for (std::uint64_t i = count_ - period; i < count_; ++i) {
    least = std::min(least, past(i).live);
    most = std::max(most, past(i).live);
  }
  return static_cast<double>(most - least) >=
         (period > kLongLoop && period >= count_ / kLongPart ? kShallowBreath : kBreath) *
             static_cast<double>(most_live_ - least_live_);
}

/// The boundary inside the latest period: few live bytes, and an end that occurs once.
bool SequenceDetector::choose_signature(std::uint64_t period) {
  const std::uint64_t begin = count_ - period;
  std::uint64_t least = ~0ull, most = 0;
  for (std::uint64_t i = begin; i < count_; ++i) {
    least = std::min(least, past(i).live);
    most = std::max(most, past(i).live);
  }
  for (std::uint32_t length = kFew; length <= std::min<std::uint64_t>(kLongestSignature, period); length *= 2) {
    if (begin < first_ + length + 1) return false;
    std::unordered_map<std::uint64_t, std::uint32_t> times;
    for (std::uint64_t i = begin; i < count_; ++i) ++times[window_sum(i - length, i, true)];  // ops before op i
    std::uint64_t best = ~0ull, where = 0;
    for (std::uint64_t i = begin; i < count_; ++i) {
      const std::uint64_t live = past(i).live;
      if (times[window_sum(i - length, i, true)] == 1 && live < best) {
        best = live;
        where = i;
      }
    }
    // Not much above the least, or else a longer signature may find a better place.
    if (best != ~0ull &&
        (best - least <= (most - least) / 50 || length * 2 > kLongestSignature || length * 2 > period)) {
      signature_ = Signature{window_sum(where - length, where, true), length, period};
      running_.clear();  // what has run until now is no step
      return true;
    }
  }
  return false;
}

void SequenceDetector::learn() {
  if (count_ - first_ < kFew + 1) return;
  for (const bool by_kind : {false, true}) {
    auto& latest = by_kind ? latest_kind_ : latest_;
    if (latest.size() > 2 * static_cast<std::size_t>(options_.longest_period)) latest.clear();
    const std::uint64_t few = window_sum(count_ - kFew, count_, by_kind);
    auto [at, fresh] = latest.try_emplace(few, count_);
    const std::uint64_t period = count_ - at->second;
    at->second = count_;
    if (fresh || period < options_.shortest_period || period > options_.longest_period || signature_) continue;
    if (windows_equal(period, by_kind) && breathes(period)) choose_signature(period);
  }
}

SequenceDetector::Verdict SequenceDetector::feed(const Observation& op) {
  const std::uint64_t hash = mix(op.hash), kind = mix(op.kind);
  const bool any = !history_.empty();
  Past now{hash, kind, hash, kind, op.live.count(), op.writes_parameter ? 1u : 0u};
  if (any) {
    now.hash_sum += history_.back().hash_sum * kBase;
    now.kind_sum += history_.back().kind_sum * kBase;
    now.parameter_writes += history_.back().parameter_writes;
  }
  history_.push_back(now);
  ++count_;
  most_live_ = std::max(most_live_, now.live);
  least_live_ = std::min(least_live_, now.live);
  const std::size_t keep =
      learned() ? 2 * kLongestSignature : 3 * static_cast<std::size_t>(options_.longest_period) + 2;
  while (history_.size() > keep) {
    history_.pop_front();
    ++first_;
  }
  power(std::min<std::uint64_t>(history_.size(), keep) + 1);

  Verdict verdict;
  running_.push_back(hash + (running_.empty() ? 0 : running_.back() * kBase));
  follow(verdict);
  if (explicit_) return verdict;
  if (!signature_) learn();
  if (!signature_) {
    if (running_.size() > options_.longest_period) running_.clear();
    return verdict;
  }
  const std::uint32_t length = signature_->length;
  if (count_ - first_ > length && window_sum(count_ - length, count_, true) == signature_->sum) {
    const Verdict ended = finish_step();
    verdict.step_ended = ended.step_ended;
    verdict.length = ended.length;
    verdict.seen = ended.seen;
    verdict.ended = ended.ended;
  } else if (running_.size() > 10000 + 16 * std::max<std::uint64_t>(longest_remembered(), signature_->period)) {
    signature_.reset();  // it has gone out of use: learn anew
    begun_at_boundary_ = false;
    running_.clear();
  }
  return verdict;
}

SequenceDetector::Verdict SequenceDetector::end_step() {
  explicit_ = true;
  signature_.reset();
  latest_.clear();
  latest_kind_.clear();
  return finish_step();
}

SequenceDetector::Verdict SequenceDetector::finish_step() {
  Verdict verdict;
  const bool whole = begun_at_boundary_ && !running_.empty();
  begun_at_boundary_ = true;
  following_.reset();
  position_ = 0;
  if (!whole) {  // the stretch before the first boundary is no step
    running_.clear();
    return verdict;
  }
  verdict.step_ended = true;
  verdict.length = static_cast<std::uint32_t>(running_.size());
  auto same = std::find_if(sequences_.begin(), sequences_.end(), [&](const Sequence& s) {
    return s.prefix.size() == running_.size() && s.prefix.back() == running_.back();
  });
  if (same == sequences_.end()) {
    if (sequences_.size() >= options_.remembered)
      sequences_.erase(std::min_element(sequences_.begin(), sequences_.end(), [](const Sequence& a, const Sequence& b) {
        return a.last_seen < b.last_seen;
      }));
    Sequence fresh;
    fresh.id = next_id_++;
    fresh.prefix = running_;
    find_join(fresh);
    sequences_.push_back(std::move(fresh));
    same = sequences_.end() - 1;
  }
  same->last_seen = ++clock_;
  verdict.seen = ++same->seen;
  verdict.ended = latest_ended_ = same->id;
  running_.clear();
  return verdict;
}

const SequenceDetector::Sequence* SequenceDetector::find(std::uint32_t id) const {
  for (const Sequence& s : sequences_)
    if (s.id == id) return &s;
  return nullptr;
}

/// The most recently seen sequence whose first position + 1 ops have this sum.
const SequenceDetector::Sequence* SequenceDetector::matching(std::size_t position, std::uint64_t sum) const {
  const Sequence* best = nullptr;
  for (const Sequence& s : sequences_)
    if (position < s.prefix.size() && s.prefix[position] == sum && (!best || s.last_seen > best->last_seen)) best = &s;
  return best;
}

void SequenceDetector::follow(Verdict& verdict) {
  if (sequences_.empty()) return;
  const std::size_t at = running_.size() - 1;
  if (begun_at_boundary_) {
    const Sequence* s = following_ && position_ == at ? find(*following_) : nullptr;
    if (!(s && at < s->prefix.size() && s->prefix[at] == running_[at])) s = matching(at, running_[at]);
    if (s) {
      following_ = s->id;
      position_ = static_cast<std::uint32_t>(at + 1);
      verdict.following = following_;
      verdict.position = static_cast<std::uint32_t>(at);
      return;
    }
  }
  // Off the known tracks: is this the beginning of a known step, kJoinOps ops ago?
  following_.reset();
  for (const Sequence& s : sequences_) {
    if (s.join_ops == 0 || at < s.join_ops) continue;
    if (running_[at] - running_[at - s.join_ops] * power(s.join_ops) != s.join) continue;
    // What ran before belongs to no step: drop it, so that this one is a whole step when it ends.
    std::vector<std::uint64_t> rest(s.prefix.begin(), s.prefix.begin() + s.join_ops);
    running_ = std::move(rest);
    begun_at_boundary_ = true;
    following_ = s.id;
    position_ = s.join_ops;
    verdict.following = following_;
    verdict.position = s.join_ops - 1;
    return;
  }
}

void SequenceDetector::find_join(Sequence& sequence) {
  const auto& prefix = sequence.prefix;
  for (std::uint32_t ops = kJoinOps; ops < prefix.size() && ops <= kMostJoinOps; ops *= 2) {
    const std::uint64_t join = prefix[ops - 1];
    bool again = false;
    for (std::size_t i = ops; i < prefix.size() && !again; ++i) again = prefix[i] - prefix[i - ops] * power(ops) == join;
    if (again) continue;
    sequence.join = join;
    sequence.join_ops = ops;
    return;
  }
}

std::size_t SequenceDetector::longest_remembered() const {
  std::size_t longest = 0;
  for (const Sequence& s : sequences_) longest = std::max(longest, s.prefix.size());
  return longest;
}

std::optional<std::uint32_t> SequenceDetector::expected() const { return latest_ended_; }

std::uint32_t SequenceDetector::length(std::uint32_t sequence) const {
  const Sequence* s = find(sequence);
  return s ? static_cast<std::uint32_t>(s->prefix.size()) : 0;
}

void SequenceDetector::leave_step() {
  begun_at_boundary_ = false;
  running_.clear();
  following_.reset();
  position_ = 0;
}

void SequenceDetector::forget_everything() {
  const Options options = options_;
  const std::uint32_t id = next_id_;
  *this = SequenceDetector(options);
  next_id_ = id;
}

}  // namespace memfit::trace
