// A simulated accelerator for tests, on PyTorch's PrivateUse1 key: two devices whose streams are threads.
//
// Work begins late by a seeded chance and copies land in parts, so that a missing wait shows in the bytes. A clock per
// stream reports accesses that nothing orders, whatever the timing was. Memory of the device has no access rights where
// tensors see it: the host cannot read it. Memory is poisoned when it is lent again. Rules of captures, contexts,
// pageable and pinned copies are those of CUDA. Operators are computed by the CPU's kernels on the stream's thread.
//
// Not simulated: speed, locks of a driver, branches of a graph (a replay runs its work in the order of the capture).
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pthread.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <sys/mman.h>
#include <torch/library.h>
#include <unistd.h>
#include <condition_variable>
#include <deque>
#include <random>
#include <thread>

namespace {
using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::IValue;
using c10::Stream;
using torch::jit::Stack;

constexpr auto SIM = c10::DeviceType::PrivateUse1;
constexpr int DEVICES = 2, STREAMS = 32;
constexpr size_t ARENA_BYTES = size_t(8) << 30;
constexpr unsigned char POISON = 0xDB;
enum Kind { KERNEL, DOWN, UP, PLAIN, MARK };  // the first three are late by chance, and may be dropped
enum Status { OUT_OF_MEMORY = 2, ILLEGAL_ACCESS = 700, ALREADY_REGISTERED = 712, NOT_REGISTERED = 713,
              CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901, CAPTURE_ISOLATION = 905, CAPTURED_EVENT = 907 };

// ── State of the simulation: one lock for all of it, never held while a stream is waited for ────────────────────────
struct Queue; struct Graph;
using Clock = std::map<Queue*, uint64_t>;
struct Simulation {
  std::vector<std::string> reports;     // unordered accesses and broken rules
  std::map<std::string, long> counts;   // what was called how often
  std::set<int> contexts;               // devices with a context
  std::string broken;                   // the sticky error
  int delay_us[4] = {0, 0, 0, 0}, chance = 1000;
  uint64_t seed = 0;
  int fault_kind = -1, hung = -1;       // `hung`: the device that no longer answers
  long fault_in = 0, oom_in = 0, refuse_in = 0, refuse_count = 0;
  bool fault_hangs = false;
  bool strict = false;                  // report memory that is freed while other streams may use it
  size_t limit[DEVICES] = {ARENA_BYTES, ARENA_BYTES}, used[DEVICES] = {}, peak[DEVICES] = {};
  std::set<Graph*> captures;
  Clock host;                           // behind what the host has waited for
  std::map<uintptr_t, size_t> regions;  // memory that streams know: begin and size
};
auto& sim = *new Simulation;
auto& g_mutex = *new std::recursive_mutex;
auto& g_answers = *new std::condition_variable_any;
using Lock = std::unique_lock<std::recursive_mutex>;
std::atomic<bool> g_forked{false};
thread_local int t_device = 0;
thread_local int64_t t_stream[DEVICES] = {};
thread_local bool t_relaxed = false;  // the capture mode of this thread
thread_local int t_refused = 0;       // a status that the driver keeps for whoever launches next

void report(const std::string& what) { Lock l(g_mutex); sim.reports.push_back(what); }
void count(const std::string& what) { Lock l(g_mutex); sim.counts[what]++; }
void need_context(int device) { Lock l(g_mutex); sim.contexts.insert(device); }
[[noreturn]] void fail(int status, const std::string& what) {
  throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, status, "sim error: " + what);
}
void check_usable() {
  if (g_forked) throw std::runtime_error("sim error: cannot be used in a forked process");
  Lock l(g_mutex);
  if (!sim.broken.empty()) fail(ILLEGAL_ACCESS, sim.broken);
}

// ── Streams: a thread each, with a clock; a mark is a place in the order of one ─────────────────────────────────────
void join(Clock& into, const Clock& other) {
  for (auto& [queue, time] : other) into[queue] = std::max(into[queue], time);
}
double now_ms() { return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
struct Mark {
  Clock clock;
  Graph* graph = nullptr;  // the capture it was recorded in
  std::mutex m;
  std::condition_variable cv;
  bool done = false;
  double at_ms = 0;
  void set() { std::lock_guard l(m); done = true; at_ms = now_ms(); cv.notify_all(); }
  void wait() { std::unique_lock l(m); cv.wait(l, [&] { return done; }); }
  bool is_done() { std::lock_guard l(m); return done; }
};
using MarkRef = std::shared_ptr<Mark>;
using Run = std::function<void(Queue&)>;
struct Access { uintptr_t low, high; bool write; };
struct Work { Kind kind; Run run; };

void break_device(const std::string& what) { Lock l(g_mutex); if (sim.broken.empty()) sim.broken = what; }
bool may_run(int device, Kind kind) {  // false: the device broke before
  Lock l(g_mutex);
  if (sim.fault_kind == kind && --sim.fault_in == 0) {
    if (sim.fault_hangs) sim.hung = device; else sim.broken = "an illegal memory access was encountered";
  }
  g_answers.wait(l, [&] { return sim.hung != device; });
  return sim.broken.empty();
}
struct Queue {
  const int device;
  const int64_t id;
  std::mutex m;
  std::condition_variable cv;
  std::deque<Work> work;
  bool is_busy = false;
  std::mt19937_64 random;
  Clock clock;
  Graph* graph = nullptr;  // the capture that this stream is part of
  Queue(int device, int64_t id) : device(device), id(id) { reseed(); std::thread([this] { run(); }).detach(); }
  void reseed() { std::lock_guard l(m); random.seed(sim.seed * 7919 + id * 31 + device); }
  void push(Kind kind, Run run) { std::lock_guard l(m); work.push_back({kind, std::move(run)}); cv.notify_one(); }
  bool is_idle() { std::lock_guard l(m); return work.empty() && !is_busy; }
  MarkRef mark() {
    auto mark = std::make_shared<Mark>();
    Lock l(g_mutex);
    mark->clock = clock;
    push(MARK, [mark](Queue&) { mark->set(); });
    return mark;
  }
  void wait_for(const MarkRef& mark) {
    Lock l(g_mutex);
    join(clock, mark->clock);
    push(PLAIN, [mark](Queue&) { mark->wait(); });
  }
  void dawdle(Kind kind, int parts = 1) {
    int most = sim.delay_us[kind], chance = sim.chance;
    std::unique_lock l(m);
    bool is_late = most > 0 && int(random() % 1000) < chance;
    int delay = is_late ? random() % most / parts : 0;
    l.unlock();
    if (delay) usleep(delay);
  }
  void run() {
    at::AutoDispatchBelowADInplaceOrView below;
    c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset);
    while (true) {
      Work one;
      { std::unique_lock l(m); is_busy = false; cv.wait(l, [&] { return !work.empty(); });
        one = std::move(work.front()); work.pop_front(); is_busy = one.kind != MARK; }
      if (one.kind < PLAIN && !may_run(device, one.kind)) continue;
      if (one.kind < PLAIN) dawdle(one.kind);
      try { one.run(*this); }
      catch (const c10::Error& e) { break_device(e.what_without_backtrace()); }
      catch (const std::exception& e) { break_device(e.what()); }
    }
  }
};
auto& g_queues = *new std::map<std::pair<int, int64_t>, Queue*>();
Queue* queue_of(int device, int64_t id) {
  check_usable();
  Lock l(g_mutex);
  auto& found = g_queues[{device, id}];
  if (!found) found = new Queue(device, id);
  return found;
}
Queue* queue_of(const Stream& s) { return queue_of(s.device_index(), s.id()); }
Queue* current(int device) { return queue_of(device, t_stream[device]); }

// ── Captures ────────────────────────────────────────────────────────────────────────────────────────────────────────
struct Seeds { uint64_t seed = 0, offset = 0; };
struct Block;
struct Item { Kind kind; std::string name; std::vector<Access> accesses; Run run; };
struct Graph {
  std::vector<Item> items;
  std::set<Queue*> streams;
  std::string broken;
  std::map<size_t, std::vector<Block*>> spare;  // its memory is never lent to others
  std::shared_ptr<Seeds> seeds = std::make_shared<Seeds>();
  uint64_t draws = 0;
};
// What the mode "global" forbids every thread while any stream is captured. It breaks the captures, too.
void forbidden_in_capture(const std::string& what) {
  check_usable();
  Lock l(g_mutex);
  if (sim.captures.empty() || t_relaxed) return;
  for (auto* one : sim.captures) one->broken = what;
  fail(CAPTURE_UNSUPPORTED, "operation not permitted when stream is capturing: " + what);
}
[[noreturn]] void break_capture(Graph* graph, int status, const std::string& what) {
  Lock l(g_mutex);
  graph->broken = what;
  fail(status, what);
}
void wait_on_host(const MarkRef& mark) {
  if (mark->graph) break_capture(mark->graph, CAPTURED_EVENT, "the host waits for an event of a capture");
  mark->wait();
  Lock l(g_mutex);
  join(sim.host, mark->clock);
}
void synchronize(Queue* queue) {
  if (queue->graph) break_capture(queue->graph, CAPTURE_UNSUPPORTED, "the host waits for a stream that is captured");
  forbidden_in_capture("synchronize");
  wait_on_host(queue->mark());
  check_usable();
}

// ── Accesses that nothing orders ────────────────────────────────────────────────────────────────────────────────────
struct Past { Access at; Queue* queue; uint64_t time; std::string name; };
auto& g_past = *new std::map<uintptr_t, std::vector<Past>>();  // by region
uintptr_t region_of(uintptr_t at) {
  auto next = sim.regions.upper_bound(at);
  if (next == sim.regions.begin()) return 0;
  auto [begin, size] = *--next;
  return at < begin + size ? begin : 0;
}
void compare(Queue* queue, uint64_t time, const Access& at, const std::string& name) {
  auto region = region_of(at.low);
  if (!region || at.low >= at.high) return;
  auto& all = g_past[region];
  std::vector<Past> kept;
  for (auto& past : all) {
    bool overlaps = past.at.low < at.high && at.low < past.at.high;
    bool ordered = past.queue == queue || queue->clock[past.queue] >= past.time;
    if (overlaps && !ordered && (at.write || past.at.write))
      report("unordered: " + name + (at.write ? " writes" : " reads") + " on stream " + std::to_string(queue->id) +
             " what " + past.name + (past.at.write ? " writes" : " reads") + " on stream " + std::to_string(past.queue->id));
    bool is_covered = ordered && at.low <= past.at.low && past.at.high <= at.high &&
                      (at.write || (!past.at.write && past.queue == queue));
    if (!is_covered) kept.push_back(std::move(past));
  }
  if (kept.size() > 256) kept.erase(kept.begin(), kept.begin() + 128);
  kept.push_back({at, queue, time, name});
  all = std::move(kept);
}
// Enqueue work that makes these accesses; a stream that is captured keeps it for the replays instead.
void enqueue(Queue* queue, Kind kind, const std::string& name, const std::vector<Access>& accesses, Run run) {
  if (t_refused) fail(std::exchange(t_refused, 0), "a registration was refused before");
  Lock l(g_mutex);
  need_context(queue->device);
  if (queue->graph) { queue->graph->items.push_back({kind, name, accesses, std::move(run)}); return; }
  join(queue->clock, sim.host);
  auto time = ++queue->clock[queue];
  for (auto& at : accesses) compare(queue, time, at, name);
  queue->push(kind, std::move(run));
}
Access access_of(const Tensor& t, bool write) {
  if (!t.defined() || !t.numel()) return {0, 0, false};
  size_t extent = 1;
  for (int64_t d = 0; d < t.dim(); ++d) extent += (t.size(d) - 1) * t.stride(d);
  auto low = reinterpret_cast<uintptr_t>(t.const_data_ptr());
  return {low, low + extent * t.element_size(), write};
}

// ── Devices, current streams and events, as torch asks for them ─────────────────────────────────────────────────────
struct Event { MarkRef mark; };
void record_data_on_stream(const c10::DataPtr& data, Queue* queue);
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static void set(int device) {  // makes a context, as cudaSetDevice does since 12.0
    if (device != t_device) { need_context(device); t_device = device; }
  }
  static Stream stream(Device d, int64_t id) {
    return Stream(Stream::UNSAFE, Device(SIM, d.index() < 0 ? t_device : d.index()), id);
  }
  c10::DeviceType type() const override { return SIM; }
  Device exchangeDevice(Device d) const override { auto was = getDevice(); set(d.index()); return was; }
  Device getDevice() const override { return Device(SIM, t_device); }
  void setDevice(Device d) const override { set(d.index()); }
  void uncheckedSetDevice(Device d) const noexcept override { t_device = d.index(); }  // makes no context
  Stream getStream(Device d) const override { return stream(d, t_stream[d.index() < 0 ? t_device : d.index()]); }
  Stream getDefaultStream(Device d) const override { return stream(d, 0); }
  Stream getNewStream(Device d, int) const override { static std::atomic<int> next{0}; return stream(d, next++ % STREAMS + 1); }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  Stream exchangeStream(Stream s) const override { auto was = getStream(s.device()); t_stream[s.device_index()] = s.id(); return was; }
  DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  bool queryStream(const Stream& s) const override { forbidden_in_capture("stream query"); return queue_of(s)->is_idle(); }
  bool isStreamCapturing(const Stream& s) const { Lock l(g_mutex); return queue_of(s)->graph; }
  void synchronizeStream(const Stream& s) const override { synchronize(queue_of(s)); }
  void synchronizeDevice(const DeviceIndex device) const override {
    forbidden_in_capture("synchronize");
    std::vector<Queue*> all;
    { Lock l(g_mutex); for (auto& [key, queue] : g_queues) if (key.first == device) all.push_back(queue); }
    for (auto* queue : all) synchronize(queue);
    check_usable();
  }
  void record(void** event, const Stream& s, const DeviceIndex, const c10::EventFlag) const override {
    auto* queue = queue_of(s);
    Lock l(g_mutex);
    need_context(queue->device);
    if (!*event) *event = new Event;
    auto& mark = static_cast<Event*>(*event)->mark;
    if (!queue->graph) { mark = queue->mark(); return; }
    mark = std::make_shared<Mark>();
    mark->graph = queue->graph;
  }
  void block(void* event, const Stream& s) const override {
    if (!event) return;
    auto* queue = queue_of(s);
    auto mark = static_cast<Event*>(event)->mark;
    Lock l(g_mutex);
    if (queue->graph && queue->graph != mark->graph)
      break_capture(queue->graph, CAPTURE_ISOLATION, "a captured stream waits for an event of outside");
    if (queue->graph) return;
    if (mark->graph && sim.captures.count(mark->graph)) { queue->graph = mark->graph; mark->graph->streams.insert(queue); return; }
    if (!mark->graph) queue->wait_for(mark);
  }
  bool queryEvent(void* event) const override {
    forbidden_in_capture("event query");
    if (!event) return true;
    auto mark = static_cast<Event*>(event)->mark;
    if (!mark->graph && !mark->is_done()) return false;
    wait_on_host(mark);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    forbidden_in_capture("event synchronize");
    if (event) wait_on_host(static_cast<Event*>(event)->mark);
    check_usable();
  }
  double elapsedTime(void* from, void* to, const DeviceIndex) const override {
    return static_cast<Event*>(to)->mark->at_ms - static_cast<Event*>(from)->mark->at_ms;
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& s) const override { record_data_on_stream(data, queue_of(s)); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// ── Memory of the devices: one arena, mapped twice ──────────────────────────────────────────────────────────────────
char *g_seen = nullptr, *g_real = nullptr;  // where tensors have it, without access; where streams read and write it
void map_arena() {
  int file = memfd_create("sim", 0);
  TORCH_CHECK(file >= 0 && ftruncate(file, ARENA_BYTES) == 0, "sim: no memory for the arena");
  auto map = [&](int access) { return static_cast<char*>(mmap(nullptr, ARENA_BYTES, access, MAP_SHARED | MAP_NORESERVE, file, 0)); };
  g_seen = map(PROT_NONE);
  g_real = map(PROT_READ | PROT_WRITE);
  madvise(g_real, ARENA_BYTES, MADV_DONTFORK);
}
void* real(const void* p) { return p ? const_cast<char*>(static_cast<const char*>(p)) - g_seen + g_real : nullptr; }
struct Block {
  char* at;
  size_t size;
  Queue* owner;
  Graph* graph;
  std::set<Queue*> users = {};         // by record_stream
  std::vector<MarkRef> in_use = {};    // until these streams are past it, it is not lent again
};
size_t g_top = 4096;
auto& g_spare = *new std::map<std::pair<Queue*, size_t>, std::vector<Block*>>();
auto& g_freed = *new std::vector<Block*>();  // while other streams use them
auto& g_live = *new std::set<Block*>();
template <class T> void take_finished(std::vector<T*>& freed, std::function<void(T*)> give_back) {
  if (!sim.captures.empty()) return;  // it would take queries of events
  std::erase_if(freed, [&](T* one) {
    if (!std::all_of(one->in_use.begin(), one->in_use.end(), [](MarkRef& mark) { return mark->is_done(); })) return false;
    for (auto& mark : one->in_use) join(sim.host, mark->clock);
    one->in_use.clear();
    give_back(one);
    return true;
  });
}
std::vector<Block*>& spare_like(Block* b) { return b->graph ? b->graph->spare[b->size] : g_spare[{b->owner, b->size}]; }
void free_block(void* p) {
  if (g_forked) return;
  auto* block = static_cast<Block*>(p);
  Lock l(g_mutex);
  g_live.erase(block);
  sim.used[block->owner->device] -= block->size;
  if (sim.strict && block->users.empty() && !block->owner->graph) {  // whoever gets it next may write to it at once
    auto at = reinterpret_cast<uintptr_t>(block->at);
    join(block->owner->clock, sim.host);
    compare(block->owner, ++block->owner->clock[block->owner], {at, at + block->size, true}, "the next owner");
  }
  for (auto* queue : block->users) block->in_use.push_back(queue->mark());
  block->users.clear();
  if (block->in_use.empty()) spare_like(block).push_back(block); else g_freed.push_back(block);
}
struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t n) override {
    const Device where(SIM, t_device);
    if (!n) return {nullptr, nullptr, [](void*) {}, where};
    auto* owner = current(t_device);
    size_t size = (n + 511) / 512 * 512;
    Lock l(g_mutex);
    need_context(t_device);
    take_finished<Block>(g_freed, [](Block* block) { spare_like(block).push_back(block); });
    count("allocation");
    bool is_refused = sim.oom_in && --sim.oom_in == 0;
    TORCH_CHECK_WITH(OutOfMemoryError, !is_refused && sim.used[t_device] + size <= sim.limit[t_device] &&
                     g_top + size <= ARENA_BYTES, "sim out of memory. Tried to allocate ", size, " bytes");
    Block wanted{nullptr, size, owner, owner->graph};
    auto& spare = spare_like(&wanted);
    Block* block;
    if (spare.empty()) {
      if (!owner->graph) forbidden_in_capture("allocation of device memory");
      block = new Block(wanted);
      block->at = g_seen + g_top;
      g_top += size;
      sim.regions[reinterpret_cast<uintptr_t>(block->at)] = size;
    } else { block = spare.back(); spare.pop_back(); }
    auto at = reinterpret_cast<uintptr_t>(block->at);
    enqueue(owner, PLAIN, "the next owner", {{at, at + size, true}}, [to = real(block->at), size](Queue&) { memset(to, POISON, size); });
    g_live.insert(block);
    sim.used[t_device] += size;
    sim.peak[t_device] = std::max(sim.peak[t_device], sim.used[t_device]);
    return {block->at, block, &free_block, where};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t n) const override {
    enqueue(current(t_device), KERNEL, "copy", {}, [=](Queue&) { memcpy(real(to), real(from), n); });
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {}
  void recordStream(const c10::DataPtr& data, Stream s) override { record_data_on_stream(data, queue_of(s)); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    Lock l(g_mutex);
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = stats.reserved_bytes[0].current = sim.used[device];
    stats.allocated_bytes[0].peak = stats.reserved_bytes[0].peak = sim.peak[device];
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex device) override { Lock l(g_mutex); sim.peak[device] = sim.used[device]; }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) {
    Lock l(g_mutex);
    return {sim.limit[device] - std::min(sim.limit[device], sim.used[device]), sim.limit[device]};
  }
} g_memory;
void record_data_on_stream(const c10::DataPtr& data, Queue* queue) {
  Lock l(g_mutex);
  auto* block = static_cast<Block*>(data.get_context());
  if (g_live.count(block) && queue != block->owner) block->users.insert(queue);
}

// ── Memory of the host that streams may use: pinned by torch's rules, or registered ─────────────────────────────────
struct Pinned { char* at; size_t size; std::set<Queue*> users = {}; std::vector<MarkRef> in_use = {}; };
struct Flight { uintptr_t low, high; MarkRef landed; };
auto& g_pinned = *new std::map<char*, Pinned*>();
auto& g_pinned_spare = *new std::map<size_t, std::vector<Pinned*>>();
auto& g_pinned_freed = *new std::vector<Pinned*>();
auto& g_flights = *new std::vector<Flight>();
void lend_again(Pinned* one) { memset(one->at, POISON, one->size); g_pinned_spare[one->size].push_back(one); }
void free_pinned(void* p) {
  if (g_forked) return;
  auto* one = static_cast<Pinned*>(p);
  Lock l(g_mutex);
  for (auto* queue : one->users) one->in_use.push_back(queue->mark());
  one->users.clear();
  if (one->in_use.empty()) lend_again(one); else g_pinned_freed.push_back(one);
}
struct HostMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    check_usable();
    size_t size = 4096;
    while (size < n) size *= 2;
    Lock l(g_mutex);
    take_finished<Pinned>(g_pinned_freed, lend_again);
    auto& spare = g_pinned_spare[size];
    if (spare.empty()) {
      forbidden_in_capture("allocation of pinned memory");
      auto* one = new Pinned{static_cast<char*>(aligned_alloc(4096, size)), size};
      g_pinned[one->at] = one;
      sim.regions[reinterpret_cast<uintptr_t>(one->at)] = size;
      lend_again(one);
    }
    auto* one = spare.back();
    spare.pop_back();
    return {one->at, one, &free_pinned, Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
} g_host_memory;
bool is_pinned(const void* p, size_t n) {
  Lock l(g_mutex);
  auto at = reinterpret_cast<uintptr_t>(p), region = region_of(at);
  return region && at + n <= region + sim.regions[region];
}
int status_of(const std::function<void()>& call) {  // what a call of the runtime returns where torch would raise
  try { call(); } catch (const c10::AcceleratorError& e) { return e.get_error_code(); }
  return 0;
}
int host_register(uintptr_t at, size_t size) {
  if (int status = status_of([] { forbidden_in_capture("registration of host memory"); })) return status;
  Lock l(g_mutex);
  need_context(t_device);
  if (sim.refuse_in && --sim.refuse_in == 0) { if (--sim.refuse_count > 0) sim.refuse_in = 1; return t_refused = OUT_OF_MEMORY; }
  auto next = sim.regions.lower_bound(at);
  if (region_of(at) || (next != sim.regions.end() && next->first < at + size)) return t_refused = ALREADY_REGISTERED;
  sim.regions[at] = size;
  count("registered");
  return 0;
}
int host_unregister(uintptr_t at) {
  if (int status = status_of([] { forbidden_in_capture("registration of host memory"); })) return status;
  Lock l(g_mutex);
  if (!sim.regions.count(at) || g_pinned.count(reinterpret_cast<char*>(at))) return NOT_REGISTERED;
  for (auto& flight : g_flights)
    if (flight.low < at + sim.regions[at] && at < flight.high && !flight.landed->is_done()) report("unregistered: a copy is under way");
  sim.regions.erase(at);
  g_past.erase(at);
  count("unregistered");
  return 0;
}

// ── Generators: numbers follow from a seed and a count of draws, taken when work is enqueued ────────────────────────
struct Generator final : c10::GeneratorImpl {
  Seeds seeds;
  explicit Generator(int device) : c10::GeneratorImpl(Device(SIM, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override { seeds = {seed, 0}; }
  void set_offset(uint64_t offset) override { seeds.offset = offset; }
  uint64_t get_offset() const override { return seeds.offset; }
  uint64_t current_seed() const override { return seeds.seed; }
  uint64_t seed() override { set_current_seed(std::random_device{}()); return seeds.seed; }
  void set_state(const c10::TensorImpl& state) override { memcpy(&seeds, state.data(), sizeof(seeds)); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({int64_t(sizeof(seeds))}, at::kByte);
    memcpy(state.data_ptr(), &seeds, sizeof(seeds));
    return state.getIntrusivePtr();
  }
  Generator* clone_impl() const override { auto* made = new Generator(device().index()); made->seeds = seeds; return made; }
};
at::Generator& default_generator(int device) {
  static auto& all = *new std::vector<at::Generator>{at::make_generator<Generator>(0), at::make_generator<Generator>(1)};
  return all.at(device < 0 ? t_device : device);
}
Seeds& seeds_of(int device) { return static_cast<Generator*>(default_generator(device).unsafeGetGeneratorImpl())->seeds; }
IValue generator_of(const std::shared_ptr<Seeds>& seeds, uint64_t draw) {
  return at::detail::createCPUGenerator(seeds->seed * 1000003 + seeds->offset + draw);
}
struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  DeviceIndex deviceCount() const override { return DEVICES; }
  void setCurrentDevice(DeviceIndex d) const override { Guard::set(d); }
  DeviceIndex getCurrentDevice() const override { return t_device; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override { auto was = t_device; Guard::set(d); return was; }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { auto was = t_device; t_device = d; return was; }
  bool isPinnedPtr(const void* p) const override { return is_pinned(p, 1); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &g_host_memory; }
  bool hasPrimaryContext(DeviceIndex d) const override { Lock l(g_mutex); return sim.contexts.count(d); }
  Device getDeviceFromPtr(void*) const override { return Device(SIM, t_device); }
  const at::Generator& getDefaultGenerator(DeviceIndex d) const override { return default_generator(d); }
  at::Generator getNewGenerator(DeviceIndex d) const override { return at::make_generator<Generator>(d < 0 ? t_device : d); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t n) const override {
    auto fresh = g_memory.allocate(n);
    auto size = std::min(n, storage.nbytes());
    if (size) g_memory.copy_data(fresh.get(), storage.data(), size);
    auto* impl = storage.unsafeGetStorageImpl();
    impl->set_data_ptr_noswap(std::move(fresh));
    impl->set_nbytes(n);
  }
};

// ── Copies between host and device ──────────────────────────────────────────────────────────────────────────────────
bool is_sim(const Tensor& t) { return t.defined() && t.device().type() == SIM; }
Tensor as_stream_sees(const Tensor& t) {  // holds no memory, as a kernel holds none
  if (!t.defined()) return t;
  auto made = at::from_blob(real(t.const_data_ptr()), t.sizes(), t.strides(), t.options().device(c10::kCPU).requires_grad(false));
  if (t.is_conj()) made._set_conj(true);
  if (t.is_neg()) made._set_neg(true);
  return made;
}
void copy_in_parts(char* to, const char* from, size_t n, Queue& queue, Kind kind) {
  size_t part = n >= 4096 ? n / 4 : n;
  for (size_t at = 0; at < n; at += part) {
    memcpy(to + at, from + at, std::min(part, n - at));
    if (at + part < n) queue.dawdle(kind, 4);
  }
}
void copy_between_devices(const Tensor& from, const Tensor& to) {
  auto *queue = current(from.device().index()), *other = current(to.device().index());
  if (queue != other) queue->wait_for(other->mark());
  count("device to device");
  enqueue(queue, KERNEL, "copy", {access_of(from, false), access_of(to, true)},
          [a = as_stream_sees(from), b = as_stream_sees(to)](Queue&) { b.copy_(a); });
  if (queue != other) other->wait_for(queue->mark());
}
// As copy_kernel_cuda: what must be converted or laid out goes through memory of the device, or of the host.
void copy_through_temporary(const Tensor& from, const Tensor& to, bool non_blocking) {
  count("copy through a temporary");
  Tensor into = to, source = from;
  if (is_sim(from) == non_blocking) {
    into = to.is_contiguous() ? to : at::empty_like(to, at::MemoryFormat::Contiguous);
    source = from.to(to.scalar_type()).contiguous().resolve_conj().resolve_neg();
  } else {
    bool is_like = to.is_contiguous() && from.dtype() == to.dtype();
    into = is_like ? to : at::empty_like(to, to.options().dtype(from.scalar_type()), at::MemoryFormat::Contiguous);
    source = from.contiguous().resolve_conj().resolve_neg();
  }
  into.copy_(source, non_blocking);
  if (!into.is_same(to)) to.copy_(into, non_blocking);
}
void copy_host(const Tensor& from, const Tensor& to, bool non_blocking) {
  const bool is_down = is_sim(from);
  const Tensor& host = is_down ? to : from;
  const size_t n = to.nbytes();
  auto* memory = static_cast<char*>(const_cast<void*>(host.const_data_ptr()));
  auto low = reinterpret_cast<uintptr_t>(memory);
  auto* queue = current((is_down ? from : to).device().index());
  const bool pinned = is_pinned(memory, n), waits = !non_blocking || (is_down && !pinned);
  const Kind kind = is_down ? DOWN : UP;
  const std::string name = is_down ? "copy down" : "copy up";
  count(name + (pinned ? " pinned" : " pageable"));
  if (waits || !pinned) {
    if (queue->graph) break_capture(queue->graph, CAPTURE_UNSUPPORTED, name + " of pageable memory, or awaited by the host");
    forbidden_in_capture(name);
  }
  std::vector<Access> accesses{access_of(is_down ? from : to, !is_down)};
  if (pinned) accesses.push_back({low, low + n, is_down});
  auto* device = static_cast<char*>(real((is_down ? from : to).const_data_ptr()));
  if (!is_down && !pinned) {  // the host may change its memory when the call returns
    auto kept = std::make_shared<std::vector<char>>(memory, memory + n);
    enqueue(queue, kind, name, accesses, [=](Queue& q) { copy_in_parts(device, kept->data(), n, q, kind); });
  } else {
    auto *source = is_down ? device : memory, *target = is_down ? memory : device;
    enqueue(queue, kind, name, accesses, [=](Queue& q) { copy_in_parts(target, source, n, q, kind); });
  }
  Lock l(g_mutex);
  if (pinned && !queue->graph) {
    std::erase_if(g_flights, [](Flight& flight) { return flight.landed->is_done(); });
    g_flights.push_back({low, low + n, queue->mark()});
    // The block is found by the storage's context, or by where it begins.
    for (auto& [at, one] : g_pinned)
      if (non_blocking && (one == host.storage().data_ptr().get_context() || at == memory)) one->users.insert(queue);
  }
  l.unlock();
  if (waits) { wait_on_host(queue->mark()); check_usable(); }
}
Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
  auto from = self.sizes() == to.sizes() ? self : self.expand_as(to);
  if (!to.numel()) return to;
  bool is_plain = from.dtype() == to.dtype() && from.is_contiguous() && to.is_contiguous() &&
                  from.is_conj() == to.is_conj() && from.is_neg() == to.is_neg();
  if (is_sim(from) && is_sim(to)) copy_between_devices(from, to);
  else if (is_plain) copy_host(from, to, non_blocking);
  else copy_through_temporary(from, to, non_blocking);
  return to;
}
Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) { to.resize_(self.sizes()); return copy_from(self, to, false); }
// As foreach_tensor_copy_list_kernel_cuda_: alike tensors go through float, which makes their NaNs one; it lacks some types.
void foreach_copy(at::TensorList to, at::TensorList from, bool non_blocking) {
  bool is_batched = !to.empty() && to.size() == from.size();
  for (size_t i = 0; is_batched && i < to.size(); ++i)
    is_batched = is_sim(to[i]) && to[i].device() == from[i].device() && to[i].device() == to[0].device() &&
                 to[i].dtype() == from[i].dtype() && to[i].dtype() == to[0].dtype() && to[i].sizes() == from[i].sizes() &&
                 to[i].strides() == from[i].strides() && to[i].is_non_overlapping_and_dense() && !from[i].is_conj() && !from[i].is_neg();
  if (!is_batched) { for (size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i], non_blocking); return; }
  const auto kind = to[0].scalar_type();
  const bool is_float8 = kind == at::kFloat8_e4m3fn || kind == at::kFloat8_e5m2 || kind == at::kFloat8_e4m3fnuz || kind == at::kFloat8_e5m2fnuz;
  const bool is_small = kind == at::kHalf || kind == at::kBFloat16 || is_float8;
  TORCH_CHECK_NOT_IMPLEMENTED(is_small || kind == at::kBool || kind <= at::kDouble || kind == at::kComplexFloat ||
                              kind == at::kComplexDouble, "\"foreach_tensor_copy\" not implemented for '", kind, "'");
  auto* queue = current(to[0].device().index());
  std::vector<Access> accesses;
  std::vector<std::pair<Tensor, Tensor>> pairs;
  for (size_t i = 0; i < to.size(); ++i) {
    accesses.push_back(access_of(from[i], false));
    accesses.push_back(access_of(to[i], true));
    pairs.push_back({as_stream_sees(to[i]), as_stream_sees(from[i])});
  }
  enqueue(queue, KERNEL, "foreach copy", accesses, [=](Queue&) {
    for (auto& [into, source] : pairs) {
      if (!is_small) { auto made = into; made.copy_(source); continue; }
      auto wide = source.to(at::kFloat);
      auto made = into;
      made.copy_(wide.masked_fill(wide.isnan(), NAN));
    }
  });
}
at::Scalar local_scalar_dense(const Tensor& self) {
  auto value = at::empty({}, self.options().device(c10::kCPU));
  copy_host(self.as_strided({}, {}), value, false);
  return at::_local_scalar_dense(value);
}
std::tuple<Tensor, Tensor> native_dropout(const Tensor& t, double p, std::optional<bool>) {  // the CPU's names no generator
  auto mask = at::empty_like(t).bernoulli_(1 - p);
  return {t * mask * (p < 1 ? 1 / (1 - p) : 0.0), mask.to(at::kBool)};
}
Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, &g_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}
Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> device,
             std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(size, &g_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

// ── Every other operator: enqueued with the memory of its arguments, computed as the CPU does ───────────────────────
template <class F> void each_tensor(const IValue& value, F see) {
  if (value.isTensor()) see(value.toTensor());
  else if (value.isTensorList()) for (const Tensor& t : value.toTensorList()) see(t);
  else if (value.isList()) for (const IValue& one : value.toListRef()) if (one.isTensor()) see(one.toTensor());
}
template <class F> Stack with_tensors(const Stack& values, F change) {
  Stack made;
  for (auto& value : values) {
    if (value.isTensor()) made.emplace_back(change(value.toTensor()));
    else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : value.toTensorList()) list.push_back(change(t));
      made.emplace_back(list);
    } else if (value.isList() && value.toList().elementType()->kind() == c10::TypeKind::OptionalType) {
      c10::List<std::optional<Tensor>> list;
      for (const IValue& one : value.toListRef()) list.push_back(one.isTensor() ? std::optional(change(one.toTensor())) : std::nullopt);
      made.emplace_back(list);
    } else made.push_back(value.isDevice() && value.toDevice().type() == SIM ? IValue(Device(c10::kCPU)) : value);
  }
  return made;
}
struct Call {
  c10::OperatorHandle op;
  Stack arguments;                // with the memory that streams see
  int generator = -1;             // the argument that is one
  std::shared_ptr<Seeds> seeds = nullptr;
  uint64_t draw = 0;
  Stack compute() const {
    Stack stack = arguments;
    if (generator >= 0) stack[generator] = generator_of(seeds, draw);
    if (op.schema().name() == "aten::native_layer_norm_backward")  // of its forward, a composite that keeps these in FP32
      for (int i : {3, 4}) stack[i] = stack[i].toTensor().to(stack[0].toTensor().scalar_type());
    op.callBoxed(&stack);
    return stack;
  }
};
void take_draw(Call& call, const IValue& given, Queue* queue) {
  auto* generator = (given.isNone() ? default_generator(queue->device) : given.toGenerator()).unsafeGetGeneratorImpl();
  Lock l(g_mutex);
  if (queue->graph) { call.seeds = queue->graph->seeds; call.draw = queue->graph->draws++; return; }
  auto* own = static_cast<Generator*>(generator);
  call.seeds = std::make_shared<Seeds>(own->seeds);
  own->seeds.offset++;
}
std::vector<Access> accesses_of(const c10::FunctionSchema& schema, const Stack& given) {
  std::vector<Access> found;
  for (size_t i = 0; i < given.size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    bool is_statistic = schema.name() == "aten::native_batch_norm" && (i == 3 || i == 4);  // written, though not declared
    each_tensor(given[i], [&](const Tensor& t) { if (is_sim(t)) found.push_back(access_of(t, is_statistic || (alias && alias->isWrite()))); });
  }
  return found;
}
Device device_of(const Stack& given) {
  std::optional<Device> found;
  for (auto& value : given) {
    each_tensor(value, [&](const Tensor& t) { if (is_sim(t) && !found) found = t.device(); });
    if (!found && value.isDevice() && value.toDevice().type() == SIM) found = value.toDevice();
  }
  return found && found->has_index() ? *found : Device(SIM, t_device);
}
// What it returns if all of that are arguments it wrote to; nothing if it makes tensors.
std::optional<Stack> returned_arguments(const c10::FunctionSchema& schema, const Stack& given) {
  Stack found;
  for (auto& result : schema.returns()) {
    const auto* alias = result.alias_info();
    if (!alias) return std::nullopt;
    TORCH_CHECK(alias->isWrite(), "sim: a view that it does not know: ", schema.name());
    for (size_t i = 0; i < given.size(); ++i) {
      const auto* other = schema.arguments()[i].alias_info();
      if (other && other->beforeSets() == alias->beforeSets()) { found.push_back(given[i]); break; }
    }
  }
  return found;
}
// The shapes of what it makes, without computing it; nothing where they depend on data.
std::optional<Stack> shapes_of(const c10::OperatorHandle& op, const Stack& given) {
  auto stack = with_tensors(given, [](const Tensor& t) {
    return t.defined() ? at::empty_strided(t.sizes(), t.strides(), t.options().device(c10::kMeta)) : t; });
  try { op.callBoxed(&stack); } catch (const std::exception&) { return std::nullopt; }
  for (auto& value : stack) if (!value.isTensor() && !value.isTensorList()) return std::nullopt;
  return stack;
}
void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const Stack given = torch::jit::pop(*stack, schema.arguments().size());
  const Device where = device_of(given);
  const c10::DeviceGuard guard(where);
  auto* queue = current(where.index());
  auto results = returned_arguments(schema, given);
  if (results && std::any_of(schema.arguments().begin(), schema.arguments().end(), [](auto& one) { return one.is_out(); }))
    if (auto shapes = shapes_of(op, given))
      for (size_t i = 0; i < results->size(); ++i)
        if ((*results)[i].isTensor()) (*results)[i].toTensor().resize_((*shapes)[i].toTensor().sizes());
  Call call{op, with_tensors(given, [](const Tensor& t) { return !t.defined() ? t : is_sim(t) ? as_stream_sees(t) : t.clone(); })};
  for (size_t i = 0; i < given.size(); ++i)
    if (schema.arguments()[i].name() == "generator") { call.generator = i; take_draw(call, given[i], queue); }
  auto accesses = accesses_of(schema, given);
  if (results) {
    enqueue(queue, KERNEL, schema.name(), accesses, [call](Queue&) { call.compute(); });
  } else if (auto shapes = shapes_of(op, given)) {
    std::vector<Tensor> into;
    results = with_tensors(*shapes, [&](const Tensor& t) {
      if (!t.defined()) return t;
      auto made = at::empty_strided(t.sizes(), t.strides(), t.options().device(where));
      into.push_back(as_stream_sees(made));
      accesses.push_back(access_of(made, true));
      return made;
    });
    enqueue(queue, KERNEL, schema.name(), accesses, [call, into](Queue&) {
      size_t next = 0;
      for (auto& value : call.compute())
        each_tensor(value, [&](const Tensor& t) { if (t.defined()) { auto to = into.at(next++); to.copy_(t); } });
    });
  } else {
    count("the host waits: " + schema.name());
    enqueue(queue, PLAIN, schema.name(), accesses, [](Queue&) {});
    synchronize(queue);
    results = with_tensors(call.compute(), [&](const Tensor& t) { return t.defined() ? t.to(where) : t; });
  }
  for (auto& result : *results) stack->push_back(result);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  using Sizes = at::IntArrayRef;
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_foreach_copy_", &foreach_copy);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("native_dropout", &native_dropout);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("record_stream", [](Tensor& t, Stream s) { record_data_on_stream(t.storage().data_ptr(), queue_of(s)); });
  m.impl("as_strided", [](const Tensor& t, Sizes a, Sizes b, std::optional<int64_t> c) { return at::native::as_strided_tensorimpl(t, a, b, c); });
  m.impl("view", [](const Tensor& t, Sizes a) { return at::native::view(t, a); });
  m.impl("_reshape_alias", [](const Tensor& t, Sizes a, Sizes b) { return at::native::_reshape_alias(t, a, b); });
  m.impl("unfold", [](const Tensor& t, int64_t a, int64_t b, int64_t c) { return at::native::unfold(t, a, b, c); });
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("resize_", [](const Tensor& t, Sizes a, std::optional<at::MemoryFormat> f) -> const Tensor& { return at::native::resize_(t, a, f); });
  m.impl("set_.source_Storage", [](Tensor& t, at::Storage s) -> Tensor& { return at::native::set_(t, s); });
  m.impl("set_.source_Storage_storage_offset", [](Tensor& t, at::Storage s, int64_t o, Sizes a, Sizes b) -> Tensor& { return at::native::set_storage_cpu_(t, s, o, a, b); });
  m.impl("set_.source_Tensor", [](Tensor& t, const Tensor& s) -> Tensor& { return at::native::set_tensor_(t, s); });
}

Graph* begin_capture() {
  auto* queue = current(t_device);
  Lock l(g_mutex);
  auto* graph = new Graph;  // its memory stays with it, for good
  graph->streams.insert(queue);
  sim.captures.insert(graph);
  return queue->graph = graph;
}
void end_capture(Graph* graph) {
  Lock l(g_mutex);
  for (auto* queue : graph->streams) queue->graph = nullptr;
  sim.captures.erase(graph);
  if (!graph->broken.empty()) fail(CAPTURE_INVALIDATED, "operation failed due to a previous error during capture: " + graph->broken);
}
void replay(Graph* graph) {
  TORCH_CHECK(graph->broken.empty(), "sim: a capture that broke cannot be replayed");
  auto* queue = current(t_device);
  Lock l(g_mutex);
  auto& own = seeds_of(t_device);
  queue->push(PLAIN, [kept = graph->seeds, now = own](Queue&) { *kept = now; });
  own.offset += graph->draws;
  for (auto& item : graph->items) enqueue(queue, item.kind, item.name, item.accesses, item.run);
}
void recover() {  // as a new process would find it; what hung goes on
  Lock l(g_mutex);
  sim.broken.clear();
  sim.hung = sim.fault_kind = -1;
  sim.oom_in = sim.refuse_in = sim.refuse_count = 0;
  std::fill(sim.limit, sim.limit + DEVICES, ARENA_BYTES);
  g_answers.notify_all();
}
template <class T> T taken(T& from) { Lock l(g_mutex); return std::exchange(from, T()); }
}  // namespace

PYBIND11_MODULE(simdev, m) {
  using Release = pybind11::call_guard<pybind11::gil_scoped_release>;
  map_arena();
  pthread_atfork(nullptr, nullptr, [] { g_forked = true; });
  c10::SetAllocator(SIM, &g_memory, 10);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  pybind11::class_<Graph>(m, "Graph");
  m.def("delays", [](int kernel, int down, int up, int chance) {
    Lock l(g_mutex);
    sim.delay_us[KERNEL] = kernel, sim.delay_us[DOWN] = down, sim.delay_us[UP] = up, sim.chance = chance; });
  m.def("seed", [](uint64_t seed) { Lock l(g_mutex); sim.seed = seed; for (auto& [key, queue] : g_queues) queue->reseed(); });
  m.def("reports", [] { return taken(sim.reports); });
  m.def("counts", [] { return taken(sim.counts); });
  m.def("contexts", [] { Lock l(g_mutex); return sim.contexts; });
  m.def("forget_contexts", [] { taken(sim.contexts); });
  m.def("set_device", &Guard::set);
  m.def("maybe_set_device", [](int device) { t_device = device; });
  m.def("current_device", [] { return t_device; });
  m.def("set_stream", [](int device, int64_t id) { Guard::set(device); t_stream[device] = id; });
  m.def("own_stream", [] { static std::atomic<int64_t> next{STREAMS}; return ++next; });
  m.def("host_register", &host_register, Release());
  m.def("host_unregister", &host_unregister, Release());
  m.def("relaxed", [](bool on) { return std::exchange(t_relaxed, on); });
  m.def("is_capturing", [] { Lock l(g_mutex); return current(t_device)->graph != nullptr; });
  m.def("begin_capture", &begin_capture, pybind11::return_value_policy::reference);
  m.def("end_capture", &end_capture);
  m.def("replay", &replay, Release());
  m.def("sleep", [](double s) { enqueue(current(t_device), KERNEL, "sleep", {}, [s](Queue&) { usleep(s * 1e6); }); });
  m.def("fault_at", [](int kind, long n, bool hangs) { Lock l(g_mutex); sim.fault_kind = kind, sim.fault_in = n, sim.fault_hangs = hangs; });
  m.def("out_of_memory_at", [](long n) { Lock l(g_mutex); sim.oom_in = n; });
  m.def("refuse_registration", [](long from, long count) { Lock l(g_mutex); sim.refuse_in = from, sim.refuse_count = count; });
  m.def("strict", [](bool on) { Lock l(g_mutex); sim.strict = on; });
  m.def("limit", [](int device, size_t bytes) { Lock l(g_mutex); sim.limit[device] = bytes; });
  m.def("recover", &recover);
  m.def("rng", [](int device) { auto& own = seeds_of(device); return std::make_pair(own.seed, own.offset); });
  m.def("set_rng", [](int device, uint64_t seed, uint64_t offset) { seeds_of(device) = {seed, offset}; });
}
