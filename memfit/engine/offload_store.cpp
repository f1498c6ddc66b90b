#include "memfit/engine/offload_store.h"

#include <cstring>

#include "memfit/engine/detail/ticks.h"
#include "memfit/plan/traffic_probe.h"

namespace memfit::engine {
namespace {
constexpr std::uint64_t kPlaceUnit = 4096;
// A place that is more than this much too large is kept for what needs it.
constexpr std::uint64_t kLargestWaste = 8;  // a eighth
}  // namespace

OffloadStore::Copy::~Copy() {
  wait(*this);
  store_.free_place(at_, place_);
}

OffloadStore::OffloadStore(const std::string& folder, Bytes limit)
    : limit_(limit), file_(folder), writer_(1), reader_(1) {
  const plan::OffloadPlace place = plan::probe_offload_place(folder);
  traffic_ = place.traffic;
  if (limit_ == Bytes() || limit_ > place.free) limit_ = place.free;
}

OffloadStore::~OffloadStore() = default;

std::shared_ptr<OffloadStore::Copy> OffloadStore::start_write(const void* data, std::uint64_t bytes) {
  const std::uint64_t place = (bytes + kPlaceUnit - 1) / kPlaceUnit * kPlaceUnit;
  std::shared_ptr<Copy> copy;
  {
    std::lock_guard lock(mutex_);
    const auto found = free_.lower_bound(place);
    if (found != free_.end() && found->first - place <= place / kLargestWaste) {
      copy.reset(new Copy(*this, found->second, found->first, bytes));
      free_.erase(found);
    } else if (end_ + place <= limit_.count()) {
      copy.reset(new Copy(*this, end_, place, bytes));
      end_ += place;
    } else if (found != free_.end()) {
      copy.reset(new Copy(*this, found->second, found->first, bytes));
      free_.erase(found);
    } else {
      return nullptr;
    }
    copy->busy_ = true;
  }
  // A plain pointer: whoever lets go of the copy waits for us first.
  run(writer_, [this, to = copy.get(), data] {
    to->checksum_ = detail::checksum(data, to->bytes_);
    finish(*to, file_.write(data, to->bytes_, to->at_));
  });
  written_ += bytes;
  return copy;
}

void OffloadStore::start_read(const std::shared_ptr<Copy>& copy, void* to) {
  wait(*copy);
  OffloadStore& store = copy->store_;
  {
    std::lock_guard lock(store.mutex_);
    copy->busy_ = true;
  }
  store.run(store.reader_, [&store, from = copy.get(), to] {
    int error = store.file_.read(to, from->bytes_, from->at_);
    if (error == 0 && detail::checksum(to, from->bytes_) != from->checksum_) error = kChanged;
    store.finish(*from, error);
  });
  store.read_ += copy->bytes_;
}

void OffloadStore::run(c10::ThreadPool& thread, std::function<void()> copying) {
  if (threadless_) return copying();
  thread.run(std::move(copying));
}

void OffloadStore::after_fork_in_child() {
  threadless_ = true;
  new (&mutex_) std::mutex();  // one of the parent's threads may have had it
  new (&done_) std::condition_variable();
}

void OffloadStore::finish(Copy& copy, int error) {
  std::lock_guard lock(mutex_);
  copy.busy_ = false;
  copy.error_ = error;
  done_.notify_all();  // under the lock: the one that waits may free the copy at once
}

bool OffloadStore::wait(const Copy& copy, int* error) {
  std::unique_lock lock(copy.store_.mutex_);
  copy.store_.done_.wait(lock, [&] { return !copy.busy_; });
  if (error != nullptr) *error = copy.error_;
  return copy.error_ == 0;
}

void OffloadStore::free_place(std::uint64_t at, std::uint64_t place) {
  std::lock_guard lock(mutex_);
  free_.emplace(place, at);
}

std::string OffloadStore::error_text(int error) {
  return error == kChanged ? "other bytes came back than were written" : std::strerror(error);
}

}  // namespace memfit::engine
