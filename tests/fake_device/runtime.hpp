// The emulated device itself: its streams, its events and its memory, which is memory of the host.
//
// Work that is launched on a stream waits in the queue of the stream until somebody needs its result: another
// stream, the host, or a queue that is too long. Then the waiting thread runs it. Which queue runs first is an
// order, so that a program which forgot to order two streams computes something else in some order:
//
//     now           each piece of work runs when it is launched
//     last          only what is needed runs, as late as possible
//     main_first    the default streams run as far as they can, then what is needed
//     side_first    the other streams run as far as they can, then what is needed
//     random        any stream that can run, by a seed
//
// One mutex guards all of it, also while work runs: work never needs Python, so it cannot wait for the GIL of a
// thread that waits for this mutex.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pthread.h>

#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <set>

namespace emulated {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr int kMaxDevices = 4;
constexpr size_t kLongestQueue = 4000;
constexpr int kPoison = 0xFF;  // as every byte: NaN in each floating-point format

// ------------------------------------------------------------------------------------------------ waits and forks

// How often the host waited for the device, by the kind of call.
struct Waits {
  int64_t item = 0;    // a value of a tensor was read
  int64_t copy = 0;    // a copy that blocks
  int64_t shape = 0;   // a shape depends on values
  int64_t event = 0;
  int64_t stream = 0;
  int64_t device = 0;
};

inline std::recursive_mutex& mutex() {
  static auto* made = new std::recursive_mutex;
  return *made;
}
using Locked = std::lock_guard<std::recursive_mutex>;

struct Process {
  bool is_initialized = false;
  bool is_bad_fork = false;
  int num_devices = 2;
  Waits waits;
};

inline Process& process() {
  static auto* made = new Process;
  return *made;
}

// Called by whatever touches a device. As with CUDA, a process that was forked from one that had used a device
// cannot use any: its queues and its memory are copies.
inline void initialize() {
  auto& self = process();
  TORCH_CHECK(
      !self.is_bad_fork,
      "Cannot re-initialize the emulated device in a forked subprocess. Use the 'spawn' start method.");
  self.is_initialized = true;
}

inline void after_fork() {
  auto& self = process();
  self.is_bad_fork = self.is_bad_fork || self.is_initialized;
  self.is_initialized = false;
}

// ------------------------------------------------------------------------------------------------ streams

// A point in a queue, which is reached when all work before it is done.
struct Mark {
  bool is_reached = false;
  double seconds = 0;
  struct Queue* queue = nullptr;
};
using MarkPtr = std::shared_ptr<Mark>;

struct Task {
  std::function<void()> run;
  MarkPtr reached;  // set when the task is done
  MarkPtr needed;   // of another queue: the task cannot begin before it is reached
  uint64_t number;
};

struct Queue {
  int device;
  int64_t id;  // 0 is the default stream
  std::deque<Task> tasks;
  std::vector<struct Block*> freed;  // what the next tensor on this stream may get

  bool can_run() const {
    return !tasks.empty() && (!tasks.front().needed || tasks.front().needed->is_reached);
  }
};

enum class Order { now, last, main_first, side_first, random };

inline double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void sweep();  // gives back memory that waited for a mark

class Scheduler {
 public:
  Order order = Order::now;
  std::mt19937_64 random;

  Queue& queue(int device, int64_t id) {
    auto& found = queues_[{device, id}];
    if (!found) {
      found.reset(new Queue{device, id, {}, {}});
    }
    return *found;
  }

  bool is_late() const {
    return order != Order::now;
  }

  void launch(Queue& queue, std::function<void()> run) {
    push(queue, {std::move(run), nullptr, nullptr, 0});
    while (num_tasks_ > kLongestQueue) {
      run_one(oldest());
    }
  }

  // As `launch`, for what must not run anything else.
  void append(Queue& queue, std::function<void()> run) {
    push(queue, {std::move(run), nullptr, nullptr, 0});
  }

  MarkPtr record(Queue& queue) {
    auto mark = std::make_shared<Mark>();
    mark->queue = &queue;
    if (queue.tasks.empty()) {
      reach(*mark);
    } else {
      push(queue, {nullptr, mark, nullptr, 0});
    }
    return mark;
  }

  void block(Queue& queue, const MarkPtr& mark) {
    if (mark && !mark->is_reached && mark->queue != &queue) {
      push(queue, {nullptr, nullptr, mark, 0});
    }
  }

  void finish(const MarkPtr& mark) {
    while (mark && !mark->is_reached) {
      run_one(choose(*mark->queue));
    }
    raise();
  }

  void finish(Queue& queue) {
    while (!queue.tasks.empty()) {
      run_one(choose(queue));
    }
    raise();
  }

  // Time passes for one who asks again and again.
  bool query(const MarkPtr& mark) {
    if (mark && !mark->is_reached) {
      run_one(choose(*mark->queue));
      return false;
    }
    return true;
  }

  void finish_device(int device) {
    for (auto& [key, queue] : queues_) {
      if (key.first == device) {
        finish(*queue);
      }
    }
  }

 private:
  // Whatever a task raises is raised where the host next waits, as an assertion of a kernel is.
  void raise() {
    if (error_) {
      std::rethrow_exception(std::exchange(error_, nullptr));
    }
  }

  static void reach(Mark& mark) {
    mark.is_reached = true;
    mark.seconds = seconds_now();
  }

  void push(Queue& queue, Task task) {
    task.number = next_number_++;
    queue.tasks.push_back(std::move(task));
    ++num_tasks_;
    if (!is_late()) {
      while (queue.can_run()) {
        run_one(queue);
      }
    }
  }

  void run_one(Queue& queue) {
    TORCH_INTERNAL_ASSERT(queue.can_run());
    Task task = std::move(queue.tasks.front());
    queue.tasks.pop_front();
    --num_tasks_;
    try {
      if (task.run) {
        task.run();
      }
    } catch (...) {
      error_ = error_ ? error_ : std::current_exception();
    }
    if (task.reached) {
      reach(*task.reached);
      sweep();
    }
  }

  // What must run now so that this queue goes on.
  Queue& needed(Queue& target) {
    Queue* found = &target;
    while (!found->can_run()) {
      TORCH_INTERNAL_ASSERT(!found->tasks.empty());
      found = found->tasks.front().needed->queue;
    }
    return *found;
  }

  Queue& oldest() {
    Queue* found = nullptr;
    for (auto& [key, queue] : queues_) {
      if (queue->can_run() && (!found || queue->tasks.front().number < found->tasks.front().number)) {
        found = queue.get();
      }
    }
    TORCH_INTERNAL_ASSERT(found);
    return *found;
  }

  Queue& choose(Queue& target) {
    std::vector<Queue*> able;
    for (auto& [key, queue] : queues_) {
      bool is_wanted = order == Order::random || (order == Order::main_first && key.second == 0) ||
          (order == Order::side_first && key.second != 0);
      if (is_wanted && queue->can_run()) {
        able.push_back(queue.get());
      }
    }
    if (able.empty()) {
      return needed(target);
    }
    return *able[order == Order::random ? random() % able.size() : 0];
  }

  std::map<std::pair<int, int64_t>, std::unique_ptr<Queue>> queues_;
  size_t num_tasks_ = 0;
  uint64_t next_number_ = 0;
  std::exception_ptr error_;
};

inline Scheduler& scheduler() {
  static auto* made = new Scheduler;
  return *made;
}

struct Current {
  int device = 0;
  int64_t stream[kMaxDevices] = {};
};

inline Current& current() {
  thread_local Current made;
  return made;
}

inline Queue& current_queue(int device) {
  return scheduler().queue(device, current().stream[device]);
}

// ------------------------------------------------------------------------------------------------ memory

// A block of a device, or of the host's memory where the device can read it by itself. It belongs to the stream on
// which it was taken. When it is given back, the next tensor that is taken on that stream may get it, after the work
// that the stream then has, and after that of recorded streams: whoever reads it later finds NaN in it. As with CUDA,
// a stream that was not recorded may still read it if the stream to which it belongs waits before it takes a tensor,
// as the streams of FSDP2 do.
struct Block {
  void* data;
  size_t size;
  int device;  // -1: pinned memory of the host
  Queue* home;
  std::set<Queue*> users;
  std::vector<MarkPtr> uses;  // of pinned memory
};

struct Memory {
  c10::CachingDeviceAllocator::DeviceStats stats[kMaxDevices];
  size_t limit[kMaxDevices];
  std::multimap<size_t, void*> pool;         // by size; never given back to the host, so that a late read is no crash
  std::map<const char*, Block*> pinned;      // by address
  std::vector<std::pair<Block*, std::vector<MarkPtr>>> leaving;

  Memory() {
    std::fill(std::begin(limit), std::end(limit), size_t(4) << 30);
  }
};

inline Memory& memory() {
  static auto* made = new Memory;
  return *made;
}

inline c10::CachingAllocator::Stat& allocated(int device) {
  return memory().stats[device].allocated_bytes[0];
}

inline size_t free_bytes(int device) {  // a lower limit may have been set meanwhile
  return memory().limit[device] - std::min<size_t>(memory().limit[device], allocated(device).current);
}

inline void* take(size_t size) {
  auto& pool = memory().pool;
  auto found = pool.find(size);
  void* data = nullptr;
  if (found != pool.end()) {
    data = found->second;
    pool.erase(found);
    return data;
  }
  TORCH_CHECK(posix_memalign(&data, 64, size) == 0, "the host has no memory for the emulated device");
  std::memset(data, kPoison, size);
  return data;
}

inline void give_back(Block* block) {
  std::memset(block->data, kPoison, block->size);
  memory().pool.emplace(block->size, block->data);
  delete block;
}

inline void sweep() {
  auto& leaving = memory().leaving;
  for (size_t index = 0; index < leaving.size();) {
    auto& marks = leaving[index].second;
    if (std::all_of(marks.begin(), marks.end(), [](auto& mark) { return mark->is_reached; })) {
      Block* block = leaving[index].first;
      leaving[index] = std::move(leaving.back());
      leaving.pop_back();
      if (block->device < 0) {
        give_back(block);
      } else {
        block->home->freed.push_back(block);
      }
    } else {
      ++index;
    }
  }
}

// The deleter of a tensor's memory. It makes no stream run.
inline void release(void* context) {
  if (process().is_bad_fork) {
    return;
  }
  Locked locked(mutex());
  auto* block = static_cast<Block*>(context);
  auto& late = scheduler();
  std::vector<MarkPtr> marks = std::move(block->uses);
  if (block->device < 0) {
    memory().pinned.erase(static_cast<const char*>(block->data));
  } else {
    allocated(block->device).decrease(block->size);
    memory().stats[block->device].active_bytes[0].decrease(block->size);
    for (Queue* user : block->users) {
      marks.push_back(late.record(*user));
    }
  }
  memory().leaving.emplace_back(block, std::move(marks));
  sweep();
}

inline c10::DataPtr allocate_on(int device, size_t num_bytes) {
  initialize();
  Locked locked(mutex());
  if (num_bytes == 0) {
    return {nullptr, c10::Device(kType, device)};
  }
  const size_t size = (num_bytes + 511) / 512 * 512;
  auto& stat = allocated(device);
  TORCH_CHECK_WITH(
      OutOfMemoryError, size <= free_bytes(device), "emulated out of memory. Tried to allocate ",
      size, " bytes. Device ", device, " has a total capacity of ", memory().limit[device], " bytes of which ",
      free_bytes(device), " are free.");
  stat.increase(size);
  memory().stats[device].active_bytes[0].increase(size);
  memory().stats[device].allocation[0].increase(1);
  memory().stats[device].reserved_bytes[0].current = stat.peak;
  memory().stats[device].reserved_bytes[0].peak = stat.peak;
  auto& queue = current_queue(device);
  for (Block* freed : std::exchange(queue.freed, {})) {
    scheduler().append(queue, [freed] { give_back(freed); });
  }
  auto* block = new Block{take(size), size, device, &queue, {}, {}};
  return {block->data, block, &release, c10::Device(kType, device)};
}

// The block in which an address of pinned memory is; null if it is other memory.
inline Block* pinned_block(const void* data) {
  Locked locked(mutex());
  auto& pinned = memory().pinned;
  auto after = pinned.upper_bound(static_cast<const char*>(data));
  if (after == pinned.begin()) {
    return nullptr;
  }
  auto& [start, block] = *std::prev(after);
  return static_cast<const char*>(data) < start + block->size ? block : nullptr;
}

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    return allocate_on(current().device, num_bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }
  void copy_data(void* target, const void* source, std::size_t count) const override {
    default_copy_data(target, source, count);
  }
  bool initialized() override {
    return process().is_initialized;
  }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    Locked locked(mutex());
    if (pointer.get() && pointer.get_deleter() == &release) {
      auto* block = static_cast<Block*>(pointer.get_context());
      Queue& queue = scheduler().queue(stream.device_index(), stream.id());
      if (&queue != block->home) {
        block->users.insert(&queue);
      }
    }
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    Locked locked(mutex());
    return memory().stats[device];
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    Locked locked(mutex());
    allocated(device).reset_accumulated();
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    Locked locked(mutex());
    allocated(device).reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    Locked locked(mutex());
    return {free_bytes(device), memory().limit[device]};
  }
};

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    initialize();
    Locked locked(mutex());
    if (num_bytes == 0) {
      return {nullptr, c10::Device(c10::DeviceType::CPU)};
    }
    auto* block = new Block{take(num_bytes), num_bytes, -1, nullptr, {}, {}};
    memory().pinned[static_cast<const char*>(block->data)] = block;
    return {block->data, block, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }
  void copy_data(void* target, const void* source, std::size_t count) const override {
    default_copy_data(target, source, count);
  }
};

inline DeviceAllocator& device_allocator() {
  static auto* made = new DeviceAllocator;
  return *made;
}

inline PinnedAllocator& pinned_allocator() {
  static auto* made = new PinnedAllocator;
  return *made;
}

// ------------------------------------------------------------------------------------------------ torch's guard

// Through this torch sets devices and streams, and uses events; an event is a mark on the heap.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static Queue& queue(const c10::Stream& stream) {
    initialize();
    return scheduler().queue(stream.device_index(), stream.id());
  }
  static c10::Stream stream(int device, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, device), id);
  }
  static int index(c10::Device device) {
    return device.has_index() ? device.index() : current().device;
  }
  static MarkPtr& mark(void* event) {
    return *static_cast<MarkPtr*>(event);
  }

  c10::DeviceType type() const override {
    return kType;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override {
    return {kType, static_cast<c10::DeviceIndex>(current().device)};
  }
  void setDevice(c10::Device device) const override {
    const int number = index(device);
    TORCH_CHECK(number < process().num_devices, "there is no emulated device ", number);
    current().device = number;
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current().device = index(device);
  }
  c10::Stream getStream(c10::Device device) const override {
    return stream(index(device), current().stream[index(device)]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream(index(device), 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    initialize();
    static std::atomic<int64_t> next{100};
    return stream(index(device), next++);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    static std::atomic<int64_t> next{0};
    return stream(index(device), 1 + next++ % 8);
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    auto before = getStream(next.device());
    current().stream[next.device_index()] = next.id();
    return before;
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    Locked locked(mutex());
    delete static_cast<MarkPtr*>(event);
  }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    Queue& on = queue(stream);
    Locked locked(mutex());
    if (!*event) {
      *event = new MarkPtr;
    }
    mark(*event) = scheduler().record(on);
  }
  void block(void* event, const c10::Stream& stream) const override {
    Queue& waiting = queue(stream);
    Locked locked(mutex());
    if (event) {
      scheduler().block(waiting, mark(event));
    }
  }
  bool queryEvent(void* event) const override {
    Locked locked(mutex());
    return !event || scheduler().query(mark(event));
  }
  void synchronizeEvent(void* event) const override {
    Locked locked(mutex());
    ++process().waits.event;
    if (event) {
      scheduler().finish(mark(event));
    }
  }
  double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
    Locked locked(mutex());
    TORCH_CHECK(first && second && mark(first)->is_reached && mark(second)->is_reached, "an event is not reached");
    return (mark(second)->seconds - mark(first)->seconds) * 1e3;
  }
  bool queryStream(const c10::Stream& stream) const override {
    Locked locked(mutex());
    return queue(stream).tasks.empty();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Queue& waited_for = queue(stream);
    Locked locked(mutex());
    ++process().waits.stream;
    scheduler().finish(waited_for);
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    initialize();
    Locked locked(mutex());
    ++process().waits.device;
    scheduler().finish_device(device);
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(process().num_devices);
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    device_allocator().recordStream(pointer, stream);
  }
};

}  // namespace emulated
