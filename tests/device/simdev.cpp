// A simulated accelerator for tests, on PyTorch's PrivateUse1 key: two devices with streams.
//
// Streams are threads. Work begins late by a seeded chance and copies land in parts, so that a
// missing wait shows in the bytes. A clock per stream reports accesses that nothing orders, however
// they were timed. The host cannot read memory of the device; memory is poisoned when it is lent
// again. Rules of captures, contexts, pageable and pinned copies are those of CUDA. Operators are
// computed by the CPU's kernels on the stream's thread.
//
// Not simulated: speed, locks of a driver, branches of a graph (a replay runs its work in order).
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/ForeachUtils.h>
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
using c10::OperatorHandle;
using c10::Stream;
using torch::jit::Stack;

constexpr auto SIM = c10::DeviceType::PrivateUse1;
constexpr int DEVICES = 2, STREAMS = 32;
constexpr size_t ARENA_BYTES = size_t(8) << 30;
constexpr unsigned char POISON = 0xDB;
enum Kind { KERNEL, DOWN, UP, PLAIN };  // all but the last are late by chance, and may fail
constexpr const char* KINDS[] = {"kernel", "down", "up", "plain"};
enum Status {
  OUT_OF_MEMORY = 2, ILLEGAL_ACCESS = 700, ALREADY_REGISTERED = 712, NOT_REGISTERED = 713,
  CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901, CAPTURE_ISOLATION = 905,
  CAPTURED_EVENT = 907
};

// ── State of the simulation: one lock for all of it, never held while a stream is waited for ─────
struct Queue;
struct Block;
using Clock = std::map<Queue*, uint64_t>;
using Run = std::function<void()>;
struct Access { uintptr_t low, high; bool write; };
struct Item { Kind kind; std::string name; std::vector<Access> accesses; Run run; };
struct Graph {
  std::vector<Item> items;
  std::string broken;
  std::shared_ptr<uint64_t> seed = std::make_shared<uint64_t>();  // of the replay
  uint64_t draws = 0;
};
struct Past { Access at; Queue* queue; uint64_t time; std::string name; };
struct Region { size_t size; bool is_registered; std::vector<Past> past; Block* block; };
struct Simulation {
  std::vector<std::string> reports;     // unordered accesses
  std::map<std::string, long> counts;   // what was called how often
  std::map<std::string, long> faults;   // what fails: most at the n-th call, see `is_due`
  std::set<int> contexts;               // devices with a context
  std::string broken;                   // the sticky error
  int hung = -1;                        // the device that no longer answers
  std::array<int, 4> delay_us = {};     // the longest of each kind
  int chance = 0;                       // of a thousand, that work is late
  uint64_t seed = 0;
  bool strict = false;                  // report memory freed while other streams may use it
  size_t used[DEVICES] = {}, peak[DEVICES] = {};
  std::set<Graph*> captures;
  Clock host;                           // behind what the host has waited for
  std::map<uintptr_t, Region> regions;  // memory that streams know, by its begin
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

[[noreturn]] void fail(int status, const std::string& what, const std::set<Graph*>& broken = {}) {
  Lock l(g_mutex);
  for (auto* graph : broken) graph->broken = what;
  throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, status, "sim error: " + what);
}
void check_usable() {
  if (g_forked) throw std::runtime_error("sim error: cannot be used in a forked process");
  Lock l(g_mutex);
  if (!sim.broken.empty()) fail(ILLEGAL_ACCESS, sim.broken);
}
bool is_due(const char* what) { return sim.faults[what] && --sim.faults[what] == 0; }
void make_context(int device) {
  Lock l(g_mutex);
  sim.contexts.insert(device);
}

// ── Streams: a thread each, with a clock; a mark is a place in the order of one ──────────────────
void join(Clock& into, const Clock& other) {
  for (auto& [queue, time] : other) into[queue] = std::max(into[queue], time);
}
struct Mark {
  const Clock clock = {};
  Graph* const graph = nullptr;  // the capture it was recorded in
  std::atomic<bool> is_done = false;
};
using MarkRef = std::shared_ptr<Mark>;
struct Work { Kind kind; Run run; MarkRef done; };
struct Queue {
  const int device;
  const int64_t id;
  std::condition_variable_any has_work;
  std::deque<Work> work;
  std::mt19937_64 random;
  Clock clock;
  MarkRef last = std::make_shared<Mark>(Clock(), nullptr, true);  // behind all of the work
  Graph* graph = nullptr;  // the capture that this stream is part of
  Queue(int device, int64_t id) : device(device), id(id) {
    reseed();
    std::thread([this] { run(); }).detach();
  }
  void reseed() { random.seed(sim.seed * 7919 + id * 31 + device); }
  void push(Kind kind, Run run) {
    Lock l(g_mutex);
    last = std::make_shared<Mark>(clock);
    work.push_back({kind, std::move(run), last});
    has_work.notify_one();
  }
  void wait_for(const MarkRef& mark) {
    Lock l(g_mutex);
    join(clock, mark->clock);
    push(PLAIN, [mark] { mark->is_done.wait(false); });
  }
  void dawdle(Kind kind, int parts = 1) {
    Lock l(g_mutex);
    const int most_us = sim.delay_us[kind];
    const bool is_late = most_us > 0 && int(random() % 1000) < sim.chance;
    const int delay_us = is_late ? random() % most_us / parts : 0;
    l.unlock();
    if (delay_us) usleep(delay_us);
  }
  void run() {
    at::AutoDispatchBelowADInplaceOrView below;
    for (Lock l(g_mutex);; l.lock()) {
      has_work.wait(l, [&] { return !work.empty(); });
      auto [kind, run, done] = std::move(work.front());
      work.pop_front();
      if (is_due(KINDS[kind])) {
        if (sim.faults["hangs"]) sim.hung = device;
        else sim.broken = "an illegal memory access was encountered";
      }
      g_answers.wait(l, [&] { return sim.hung != device; });
      if (sim.broken.empty()) {
        l.unlock();
        dawdle(kind);
        try {
          run();
        } catch (const std::exception& e) {
          l.lock();
          sim.broken = e.what();
        }
      }
      done->is_done = true;
      done->is_done.notify_all();
      if (l) l.unlock();
    }
  }
};
auto& g_queues = *new std::map<std::pair<int, int64_t>, Queue*>();
Queue* queue_of(int device, int64_t id) {
  check_usable();
  Lock l(g_mutex);
  auto& found = g_queues[{device, id}];
  return found ? found : found = new Queue(device, id);
}
Queue* queue_of(const Stream& s) { return queue_of(s.device_index(), s.id()); }
Queue* current(int device) { return queue_of(device, t_stream[device]); }
auto all_queues() {
  Lock l(g_mutex);
  return g_queues;
}

// ── Captures, and what the host may wait for ─────────────────────────────────────────────────────
// What the mode "global" forbids every thread while a stream is captured. It breaks captures, too.
void forbidden_in_capture(const std::string& what) {
  check_usable();
  Lock l(g_mutex);
  if (!sim.captures.empty() && !t_relaxed)
    fail(CAPTURE_UNSUPPORTED, "operation not permitted when stream is capturing: " + what,
         sim.captures);
}
void wait_on_host(const MarkRef& mark) {
  if (mark->graph) fail(CAPTURED_EVENT, "the host waits for an event of a capture", {mark->graph});
  mark->is_done.wait(false);
  Lock l(g_mutex);
  join(sim.host, mark->clock);
}
void synchronize(Queue* queue) {
  if (queue->graph)
    fail(CAPTURE_UNSUPPORTED, "the host waits for a captured stream", {queue->graph});
  forbidden_in_capture("synchronize");
  wait_on_host(queue->last);
  check_usable();
}
bool is_over(const MarkRef& mark, const char* what) {
  forbidden_in_capture(what);
  if (!mark->graph && !mark->is_done) return false;
  wait_on_host(mark);
  return true;
}

// ── Accesses that nothing orders ─────────────────────────────────────────────────────────────────
std::pair<const uintptr_t, Region>* region_of(uintptr_t at) {
  auto next = sim.regions.upper_bound(at);
  if (next == sim.regions.begin()) return nullptr;
  auto& before = *--next;
  return at < before.first + before.second.size ? &before : nullptr;
}
std::string words(const std::string& name, bool write, const Queue* queue) {
  auto where = queue ? " on stream " + std::to_string(queue->id) : " on the host";
  return name + (write ? " writes" : " reads") + where;
}
void compare(Queue* queue, Clock& clock, const Access& at, const std::string& name) {
  auto* region = region_of(at.low);
  if (!region || at.low >= at.high) return;
  auto& all = region->second.past;
  std::erase_if(all, [&](const Past& past) {
    const bool overlaps = past.at.low < at.high && at.low < past.at.high;
    const bool ordered = past.queue == queue || clock[past.queue] >= past.time;
    if (overlaps && !ordered && (at.write || past.at.write))
      sim.reports.push_back("unordered: " + words(name, at.write, queue) + " what " +
                            words(past.name, past.at.write, past.queue));
    return ordered && at.low <= past.at.low && past.at.high <= at.high &&  // nothing adds to it
           (at.write || (!past.at.write && past.queue == queue));
  });
  if (all.size() > 256) all.erase(all.begin(), all.begin() + 128);
  all.push_back({at, queue, clock[queue], name});
}
// Enqueue work that makes these accesses; a captured stream keeps it for the replays instead.
void enqueue(Queue* queue, Kind kind, const std::string& name, const std::vector<Access>& accesses,
             Run run) {
  if (t_refused) fail(std::exchange(t_refused, 0), "a registration was refused before");
  Lock l(g_mutex);
  make_context(queue->device);
  if (queue->graph) return queue->graph->items.push_back({kind, name, accesses, std::move(run)});
  join(queue->clock, sim.host);
  ++queue->clock[queue];
  for (auto& at : accesses) compare(queue, queue->clock, at, name);
  queue->push(kind, std::move(run));
}
Access access_at(const void* p, size_t n, bool write) {
  return {uintptr_t(p), uintptr_t(p) + n, write};
}
Access access_of(const Tensor& t, bool write) {
  auto extent = at::detail::computeStorageNbytes(t.sizes(), t.strides(), t.element_size());
  return access_at(t.const_data_ptr(), extent, write);
}

// ── Memory, of a stream or of the host: lent again when every stream that used it is past it ─────
struct Block {
  char* at;
  size_t size;
  Queue* owner;  // none: pinned memory of the host
  Graph* graph;  // its memory is never lent to others
  std::set<Queue*> users = {};  // by record_stream, or by copies of pinned memory
  std::vector<MarkRef> in_use = {};
  auto key() const { return std::make_tuple(owner, graph, size); }
  void poison() {  // that of a device is on its stream
    if (!owner) memset(at, POISON, size);
  }
};
auto& g_live = *new std::set<Block*>();
auto& g_freed = *new std::multimap<std::tuple<Queue*, Graph*, size_t>, Block*>();
void free_block(void* p) {
  if (g_forked) return;
  auto* block = static_cast<Block*>(p);
  Lock l(g_mutex);
  g_live.erase(block);
  if (auto* owner = block->owner) {
    sim.used[owner->device] -= block->size;
    if (sim.strict && block->users.empty() && !owner->graph) {  // its next owner may write at once
      join(owner->clock, sim.host);
      ++owner->clock[owner];
      compare(owner, owner->clock, access_at(block->at, block->size, true), "the next owner");
    }
  }
  for (auto* queue : std::exchange(block->users, {})) block->in_use.push_back(queue->last);
  if (block->in_use.empty()) block->poison();
  g_freed.insert({block->key(), block});
}
Block* lend(const Block& wanted, const char* what, const std::function<char*()>& make) {
  auto is_past = [](const MarkRef& mark) {  // it takes queries of events
    return sim.captures.empty() && mark->is_done;
  };
  auto [first, found] = g_freed.equal_range(wanted.key());
  while (first != found) {  // the one that was freed last
    auto* block = (--found)->second;
    if (!std::ranges::all_of(block->in_use, is_past)) continue;
    for (auto& mark : block->in_use) join(sim.host, mark->clock);
    if (!std::exchange(block->in_use, {}).empty()) block->poison();
    g_freed.erase(found);
    return *g_live.insert(block).first;
  }
  if (!wanted.graph) forbidden_in_capture(what);
  auto* block = new Block(wanted);
  block->at = make();
  block->poison();
  sim.regions[uintptr_t(block->at)] = {block->size, false, {}, block};
  return *g_live.insert(block).first;
}
void record_use(const c10::DataPtr& data, const Stream& s) {
  auto* queue = queue_of(s);
  Lock l(g_mutex);
  auto* block = static_cast<Block*>(data.get_context());
  if (g_live.count(block) && queue != block->owner) block->users.insert(queue);
}

char *g_seen = nullptr, *g_real = nullptr;  // one arena, where tensors have it and streams use it
size_t g_top = 4096;
void map_arena() {
  int file = memfd_create("sim", 0);
  TORCH_CHECK(file >= 0 && ftruncate(file, ARENA_BYTES) == 0, "sim: no memory for the arena");
  auto map = [&](int access) {
    return (char*)mmap(nullptr, ARENA_BYTES, access, MAP_SHARED | MAP_NORESERVE, file, 0);
  };
  g_seen = map(PROT_NONE);
  g_real = map(PROT_READ | PROT_WRITE);
  madvise(g_real, ARENA_BYTES, MADV_DONTFORK);
}
char* real(const void* p) { return p ? (char*)p - g_seen + g_real : nullptr; }
size_t limit() { return sim.faults["limit"] ? sim.faults["limit"] : ARENA_BYTES; }
struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t n) override {
    const Device where(SIM, t_device);
    if (!n) return {nullptr, where};
    auto* owner = current(t_device);
    const size_t size = (n + 511) / 512 * 512;
    Lock l(g_mutex);
    auto &used = sim.used[t_device], &peak = sim.peak[t_device];
    const bool has_room = used + size <= limit() && g_top + size <= ARENA_BYTES;
    TORCH_CHECK_WITH(OutOfMemoryError, !is_due("allocation") && has_room,
                     "sim out of memory. Tried to allocate ", size, " bytes");
    auto* block = lend({nullptr, size, owner, owner->graph}, "allocation of device memory",
                       [&] { return g_seen + std::exchange(g_top, g_top + size); });
    enqueue(owner, PLAIN, "the next owner", {access_at(block->at, size, true)},
            [to = real(block->at), size] { memset(to, POISON, size); });
    used += size;
    peak = std::max(peak, used);
    return {block->at, block, &free_block, where};
  }
  void copy_data(void* to, const void* from, size_t n) const override {
    enqueue(current(t_device), KERNEL, "copy", {}, [=] { memcpy(real(to), real(from), n); });
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, Stream s) override { record_use(data, s); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    Lock l(g_mutex);
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = stats.reserved_bytes[0].current = sim.used[device];
    stats.allocated_bytes[0].peak = stats.reserved_bytes[0].peak = sim.peak[device];
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex device) override { sim.peak[device] = sim.used[device]; }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    Lock l(g_mutex);
    return {limit() - std::min(limit(), sim.used[device]), limit()};
  }
} g_memory;
struct HostMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    check_usable();
    const size_t size = std::bit_ceil(std::max(n, size_t(4096)));
    Lock l(g_mutex);
    if (sim.faults["pinning"]) fail(OUT_OF_MEMORY, "out of memory");
    auto* block = lend({nullptr, size}, "allocation of pinned memory",
                       [&] { return (char*)aligned_alloc(4096, size); });
    return {block->at, block, &free_block, Device(c10::DeviceType::CPU)};
  }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
} g_host_memory;

// ── Memory of the host that a program registers ──────────────────────────────────────────────────
bool is_pinned(const Access& at) {
  Lock l(g_mutex);
  auto* region = region_of(at.low);
  return region && at.high <= region->first + region->second.size;
}
int add_region(uintptr_t at, size_t size) {
  make_context(t_device);
  if (is_due("registration")) {
    if (--sim.faults["registrations"] > 0) sim.faults["registration"] = 1;
    return t_refused = OUT_OF_MEMORY;
  }
  auto next = sim.regions.lower_bound(at);
  if (region_of(at) || (next != sim.regions.end() && next->first < at + size))
    return t_refused = ALREADY_REGISTERED;
  sim.regions[at] = {size, true, {}, nullptr};
  sim.counts["registered"]++;
  return 0;
}
int remove_region(uintptr_t at) {
  auto found = sim.regions.find(at);
  if (found == sim.regions.end() || !found->second.is_registered) return NOT_REGISTERED;
  compare(nullptr, sim.host, {at, at + found->second.size, true}, "unregistering");
  sim.regions.erase(found);
  sim.counts["unregistered"]++;
  return 0;
}
// What a call of the runtime returns instead of raising.
template <auto call, class... Arguments> int status_of(Arguments... given) {
  Lock l(g_mutex);
  try {
    forbidden_in_capture("registration of host memory");
    return call(given...);
  } catch (const c10::AcceleratorError& e) {
    return e.get_error_code();
  }
}

// ── Devices, current streams and events, as torch asks for them ──────────────────────────────────
MarkRef& mark_of(void* event) { return *static_cast<MarkRef*>(event); }
int set_device(int device) {  // makes a context, as cudaSetDevice does since 12.0
  if (device != t_device) make_context(device);
  return std::exchange(t_device, device);
}
int index_of(Device d) { return d.index() < 0 ? t_device : d.index(); }
Stream stream_of(Device d, int64_t id) {
  return Stream(Stream::UNSAFE, Device(SIM, index_of(d)), id);
}
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return SIM; }
  Device exchangeDevice(Device d) const override { return Device(SIM, set_device(d.index())); }
  Device getDevice() const override { return Device(SIM, t_device); }
  void setDevice(Device d) const override { set_device(d.index()); }
  void uncheckedSetDevice(Device d) const noexcept override { t_device = d.index(); }  // no context
  Stream getStream(Device d) const override { return stream_of(d, t_stream[index_of(d)]); }
  Stream getDefaultStream(Device d) const override { return stream_of(d, 0); }
  Stream getNewStream(Device d, int) const override {
    static std::atomic<int> next{0};
    return stream_of(d, next++ % STREAMS + 1);
  }
  Stream exchangeStream(Stream s) const override {
    return stream_of(s.device(), std::exchange(t_stream[s.device_index()], s.id()));
  }
  DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  bool queryStream(const Stream& s) const override {
    return is_over(queue_of(s)->last, "stream query");
  }
  bool isStreamCapturing(const Stream& s) const override { return queue_of(s)->graph; }
  void synchronizeStream(const Stream& s) const override { synchronize(queue_of(s)); }
  void synchronizeDevice(const DeviceIndex device) const override {
    forbidden_in_capture("synchronize");
    for (auto& [key, queue] : all_queues())
      if (key.first == device) synchronize(queue);
  }
  void record(void** event, const Stream& s, DeviceIndex, c10::EventFlag) const override {
    auto* queue = queue_of(s);
    Lock l(g_mutex);
    make_context(queue->device);
    if (!*event) *event = new MarkRef;
    auto captured = std::make_shared<Mark>(Clock(), queue->graph);
    mark_of(*event) = queue->graph ? captured : queue->last;
  }
  void block(void* event, const Stream& s) const override {
    if (!event) return;
    auto* queue = queue_of(s);
    auto mark = mark_of(event);
    Lock l(g_mutex);
    if (queue->graph && queue->graph != mark->graph)
      fail(CAPTURE_ISOLATION, "a captured stream awaits an event of outside", {queue->graph});
    if (!mark->graph) queue->wait_for(mark);
    if (sim.captures.count(mark->graph)) queue->graph = mark->graph;
  }
  // Each call of the runtime makes a context on the device that its thread is at.
  bool queryEvent(void* event) const override {
    make_context(t_device);
    return !event || is_over(mark_of(event), "event query");
  }
  void synchronizeEvent(void* event) const override {
    make_context(t_device);
    forbidden_in_capture("event synchronize");
    if (event) wait_on_host(mark_of(event));
    check_usable();
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<MarkRef*>(event);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& s) const override {
    record_use(data, s);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// ── Generators: each call takes a number of its generator when it is enqueued, as its own seed ───
struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(int device) {
    device_ = Device(SIM, device);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};
at::Generator new_generator(int device) {
  return at::make_generator<Generator>(device < 0 ? t_device : device);
}
at::Generator& default_generator(int device) {
  static auto& all = *new std::vector<at::Generator>{new_generator(0), new_generator(1)};
  return all.at(device < 0 ? t_device : device);
}
uint64_t draw(const at::Generator& from) { return from.get<at::CPUGeneratorImpl>()->random64(); }
struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool isPinnedPtr(const void* p) const override { return is_pinned(access_at(p, 1, false)); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &g_host_memory; }
  bool hasPrimaryContext(DeviceIndex d) const override { return sim.contexts.count(d); }
  const at::Generator& getDefaultGenerator(DeviceIndex d) const override {
    return default_generator(d);
  }
  at::Generator getNewGenerator(DeviceIndex d) const override { return new_generator(d); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t n) const override {
    auto fresh = g_memory.allocate(n);
    const auto size = std::min(n, storage.nbytes());
    if (size) g_memory.copy_data(fresh.get(), storage.data(), size);
    storage.set_data_ptr_noswap(std::move(fresh));
    storage.set_nbytes(n);
  }
};

// ── Copies between host and device ───────────────────────────────────────────────────────────────
bool is_sim(const Tensor& t) { return t.defined() && t.device().type() == SIM; }
Tensor as_stream_sees(const Tensor& t) {  // holds no memory, as a kernel holds none
  auto options = t.options().device(c10::kCPU).requires_grad(false);
  auto made = at::from_blob(real(t.const_data_ptr()), t.sizes(), t.strides(), options);
  made._set_conj(t.is_conj());
  made._set_neg(t.is_neg());
  return made;
}
void copy_between_devices(const Tensor& from, const Tensor& to) {
  auto *queue = current(from.device().index()), *other = current(to.device().index());
  if (queue != other) queue->wait_for(other->last);
  enqueue(queue, KERNEL, "copy", {access_of(from, false), access_of(to, true)},
          [a = as_stream_sees(from), b = as_stream_sees(to)] { b.copy_(a); });
  if (queue != other) other->wait_for(queue->last);
}
// As copy_kernel_cuda: what must be converted or laid out goes through memory of device or host.
void copy_through_temporary(const Tensor& from, const Tensor& to, bool non_blocking) {
  sim.counts["copy through a temporary"]++;
  const auto type = (is_sim(from) == non_blocking ? to : from).scalar_type();
  auto source = from.to(type).contiguous().resolve_conj().resolve_neg();
  auto into = to;
  if (!to.is_contiguous() || to.scalar_type() != type)
    into = at::empty_like(to, to.options().dtype(type), at::MemoryFormat::Contiguous);
  into.copy_(source, non_blocking);
  if (!into.is_same(to)) to.copy_(into, non_blocking);
}
void copy_host(const Tensor& from, const Tensor& to, bool non_blocking) {
  const Kind kind = is_sim(from) ? DOWN : UP;
  const auto reads = access_of(from, false), writes = access_of(to, true);
  const auto &host = kind == DOWN ? writes : reads, &there = kind == DOWN ? reads : writes;
  const bool pinned = is_pinned(host), waits = !non_blocking || (kind == DOWN && !pinned);
  const auto name = std::string("copy ") + KINDS[kind];
  auto* queue = current((kind == DOWN ? from : to).device().index());
  if (queue->graph && (waits || !pinned))
    fail(CAPTURE_UNSUPPORTED, name + " of pageable memory, or awaited", {queue->graph});
  if (waits || !pinned) forbidden_in_capture(name);
  auto *source = (char*)reads.low, *target = (char*)writes.low;
  (kind == DOWN ? source : target) = real((void*)there.low);
  std::vector<char> kept;  // the host may change it on return
  if (!pinned && kind == UP) kept.assign(source, (char*)reads.high);
  Lock l(g_mutex);
  sim.counts[name + (pinned ? " pinned" : " pageable")]++;
  std::vector<Access> accesses{there};
  if (pinned) accesses.push_back(host);
  enqueue(queue, kind, name, accesses, [=, n = reads.high - reads.low] {
    const size_t part = n >= 4096 ? n / 4 : n;
    for (size_t done = 0; done < n; done += part) {
      if (done) queue->dawdle(kind, 4);
      memcpy(target + done, (kept.empty() ? source : kept.data()) + done, std::min(part, n - done));
    }
  });
  auto* context = (kind == DOWN ? to : from).storage().data_ptr().get_context();
  auto begun = sim.regions.find(host.low);
  auto* beginning = begun == sim.regions.end() ? nullptr : begun->second.block;
  if (pinned && non_blocking && !queue->graph)  // found by the storage, or by where it begins
    for (auto* block : {static_cast<Block*>(context), beginning})
      if (g_live.count(block) && !block->owner) block->users.insert(queue);
  l.unlock();
  if (waits) synchronize(queue);
}
Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
  auto from = self.expand_as(to);
  const bool is_plain = from.dtype() == to.dtype() && from.is_contiguous() && to.is_contiguous() &&
                        from.is_conj() == to.is_conj() && from.is_neg() == to.is_neg();
  if (!to.numel()) return to;
  if (is_sim(from) && is_sim(to)) copy_between_devices(from, to);
  else if (is_plain) copy_host(from, to, non_blocking);
  else copy_through_temporary(from, to, non_blocking);
  return to;
}
Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &g_memory, keys,
                                           c10::dtype_or_default(dtype));
}

// ── Every other operator: enqueued with the memory of its arguments, computed as the CPU does ────
// The same with every tensor changed, in lists, too; a simulated device becomes the CPU.
template <class F> IValue with_tensors(const IValue& value, const F& change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isDevice() && value.toDevice().type() == SIM) return Device(c10::kCPU);
  if (!value.isTensorList() && !value.isOptionalTensorList()) return value;
  auto list = value.toList().copy();
  for (size_t i = 0; i < list.size(); ++i) list.set(i, with_tensors(list.get(i), change));
  return list;
}
template <class F> Stack with_tensors(const Stack& values, const F& change) {
  Stack made;
  for (auto& value : values) made.push_back(with_tensors(value, change));
  return made;
}
bool is_written(const c10::Argument& one) {
  return one.alias_info() && one.alias_info()->isWrite();
}
// The shapes of what it makes, without computing it; nothing where they depend on data. torch finds
// many of them in Python, so those of alike arguments are kept.
const std::optional<Stack>& shapes_of(const OperatorHandle& op, const Stack& given) {
  static auto& known = *new std::map<std::string, std::optional<Stack>>();
  std::ostringstream key;
  key << op.operator_name() << c10::get_default_dtype();
  auto others = with_tensors(given, [&](const Tensor& t) {
    if (t.defined()) key << t.sizes() << t.strides() << t.scalar_type();
    return Tensor();
  });
  for (auto& value : others) key << ' ' << value;
  Lock l(g_mutex);
  auto found = known.find(key.str());
  if (found != known.end()) return found->second;
  l.unlock();
  std::optional<Stack> shapes = with_tensors(given, [](const Tensor& t) {
    if (!t.defined()) return t;
    return at::empty_strided(t.sizes(), t.strides(), t.options().device(c10::kMeta));
  });
  try {
    op.callBoxed(&*shapes);
    for (auto& value : *shapes) TORCH_CHECK(value.isTensor() || value.isTensorList());
  } catch (const std::exception&) {
    shapes.reset();
  }
  l.lock();
  return known[key.str()] = shapes;
}
// A generator for each time that it is computed, by the numbers of the one that was given.
std::function<at::Generator()> generators(const IValue& given, Queue* queue) {
  Lock l(g_mutex);
  if (auto* graph = queue->graph)
    return [from = graph->seed, n = graph->draws++] {
      return at::detail::createCPUGenerator(*from + n);
    };
  auto seed = draw(given.isNone() ? default_generator(queue->device) : given.toGenerator());
  return [seed] { return at::detail::createCPUGenerator(seed); };
}
void as_cpu(const OperatorHandle& op, Stack* stack) {
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
}
void fallback(const OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const auto& name = schema.name();
  for (auto& one : schema.returns())
    if (one.alias_info() && !one.alias_info()->isWrite()) return as_cpu(op, stack);  // a view
  const Stack given = torch::jit::pop(*stack, schema.arguments().size());
  Device where(SIM, t_device);
  std::vector<Access> accesses;
  Stack written;
  for (size_t i = 0; i < given.size(); ++i) {
    bool writes = is_written(schema.arguments()[i]);
    if (writes) written.push_back(given[i]);
    writes |= name == "aten::native_batch_norm" && (i == 3 || i == 4);  // not declared
    if (given[i].isDevice() && given[i].toDevice().type() == SIM)
      where = Device(SIM, index_of(given[i].toDevice()));
    with_tensors(given[i], [&](const Tensor& t) {
      if (!is_sim(t)) return t;
      where = t.device();
      accesses.push_back(access_of(t, writes));
      return t;
    });
  }
  const c10::DeviceGuard guard(where);
  auto* queue = current(where.index());
  written.resize(schema.returns().size());
  std::optional<Stack> results;
  if (std::ranges::all_of(schema.returns(), is_written)) results = written;
  const bool is_out = schema.overload_name().ends_with("out");
  const auto shapes = !results || is_out ? shapes_of(op, given) : std::nullopt;
  for (size_t i = 0; results && shapes && i < results->size(); ++i)
    (*results)[i].toTensor().resize_((*shapes)[i].toTensor().sizes());
  std::vector<Tensor> into;  // where what it makes goes, if it does not write to its arguments
  if (!results && shapes)
    results = with_tensors(*shapes, [&](const Tensor& t) {
      if (!t.defined()) return t;
      auto made = at::empty_strided(t.sizes(), t.strides(), t.options().device(where));
      into.push_back(as_stream_sees(made));
      accesses.push_back(access_of(made, true));
      return made;
    });
  if (name == "aten::empty") return stack->push_back(results->front());
  auto seen = with_tensors(given, [](const Tensor& t) {
    return is_sim(t) ? as_stream_sees(t) : t.defined() ? t.clone() : t;
  });
  const auto random = schema.argumentIndexWithName("generator");
  auto next = random ? generators(given[*random], queue) : nullptr;
  auto compute = [=] {
    Stack stack = seen;
    if (next) stack[*random] = next();
    if (op.schema().name() == "aten::native_layer_norm_backward")
      for (int i : {3, 4})  // a composite forward keeps these in FP32
        stack[i] = stack[i].toTensor().to(stack[0].toTensor().scalar_type());
    op.callBoxed(&stack);
    return stack;
  };
  if (results) {
    enqueue(queue, KERNEL, name, accesses, [compute, into] {
      auto made = compute();
      auto next = into.begin();
      with_tensors(made, [&](const Tensor& t) {
        return next != into.end() && t.defined() ? next++->copy_(t) : t;
      });
    });
  } else {
    enqueue(queue, PLAIN, name, accesses, [] {});
    synchronize(queue);
    results = with_tensors(compute(), [&](const Tensor& t) {
      return t.defined() ? t.to(where) : t;
    });
  }
  for (auto& result : *results) stack->push_back(result);
}
// As foreach_tensor_copy_list_kernel_cuda_: alike tensors go through float; it lacks some types.
void foreach_copy(at::TensorList to, at::TensorList from, bool non_blocking) {
  if (!is_sim(to[0]) || !at::native::can_use_fast_route(to, from))
    return at::native::foreach_tensor_copy_list_kernel_slow_(to, from, non_blocking);
  const auto type = to[0].scalar_type();
  TORCH_CHECK_NOT_IMPLEMENTED(type <= at::kDouble || type == at::kComplexFloat ||
      type == at::kComplexDouble || type == at::kBool || type == at::kBFloat16 ||
      c10::isFloat8Type(type), "\"foreach_tensor_copy\" not implemented for '", type, "'");
  const bool is_narrow = to[0].element_size() < 4 && to[0].is_floating_point();
  std::vector<std::pair<Tensor, Tensor>> pairs;
  std::vector<Access> accesses;
  for (size_t i = 0; i < to.size(); ++i) {
    pairs.emplace_back(as_stream_sees(to[i]), as_stream_sees(from[i]));
    accesses.insert(accesses.end(), {access_of(to[i], true), access_of(from[i], false)});
  }
  enqueue(current(to[0].device().index()), KERNEL, "aten::_foreach_copy_", accesses, [=] {
    for (auto& [to, from] : pairs) {
      auto wide = is_narrow ? from.to(at::kFloat) : from;
      to.copy_(is_narrow ? wide.masked_fill(wide.isnan(), NAN) : wide);
    }
  });
}
std::tuple<Tensor, Tensor> native_dropout(const Tensor& t, double p, std::optional<bool>) {
  auto mask = at::empty_like(t).bernoulli_(1 - p);  // the CPU's operator names no generator
  return {t * mask * (p < 1 ? 1 / (1 - p) : 0.0), mask.to(at::kBool)};
}

TORCH_LIBRARY(sim, m) {
  m.def("generator", [](int64_t device) { return default_generator(device); });
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_foreach_copy_", &foreach_copy);
  m.impl("native_dropout", &native_dropout);
  m.impl("record_stream", [](Tensor& t, Stream s) { record_use(t.storage().data_ptr(), s); });
  for (auto* name : {"resize_", "set_.source_Storage", "set_.source_Storage_storage_offset",
                     "set_.source_Tensor", "_reshape_alias"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&as_cpu>());
}

Graph* begin_capture() {
  auto* queue = current(t_device);
  Lock l(g_mutex);
  queue->graph = new Graph;  // its memory stays with it, for good
  return *sim.captures.insert(queue->graph).first;
}
void end_capture(Graph* graph) {
  Lock l(g_mutex);
  for (auto& [key, queue] : g_queues)
    if (queue->graph == graph) queue->graph = nullptr;
  sim.captures.erase(graph);
  if (!graph->broken.empty())
    fail(CAPTURE_INVALIDATED, "operation failed due to an error during capture: " + graph->broken);
}
void replay(Graph* graph) {
  TORCH_CHECK(graph->broken.empty(), "sim: a capture that broke cannot be replayed");
  auto* queue = current(t_device);
  Lock l(g_mutex);
  const auto seed = graph->draws ? draw(default_generator(t_device)) : 0;
  queue->push(PLAIN, [kept = graph->seed, seed] { *kept = seed; });
  for (auto& item : graph->items) enqueue(queue, item.kind, item.name, item.accesses, item.run);
}
void recover() {  // as a new process would find it; what hung goes on, what broke is over
  Lock l(g_mutex);
  sim.hung = -1;
  sim.faults.clear();
  g_answers.notify_all();
  if (sim.broken.empty()) return;
  l.unlock();
  for (auto& [key, queue] : all_queues()) wait_on_host(queue->last);
  l.lock();
  sim.broken.clear();
}
struct Holder { Lock l{g_mutex}; };
}  // namespace

PYBIND11_MODULE(simdev, m) {
  using Release = pybind11::call_guard<pybind11::gil_scoped_release>;
  using Locked = pybind11::call_guard<Holder>;
  map_arena();
  pthread_atfork(nullptr, nullptr, [] { g_forked = true; });
  c10::SetAllocator(SIM, &g_memory, 10);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  pybind11::class_<Graph>(m, "Graph");
  m.def("own_stream", [next = int64_t(STREAMS)]() mutable { return ++next; });
  m.def("host_register", &status_of<add_region, uintptr_t, size_t>, Release());
  m.def("host_unregister", &status_of<remove_region, uintptr_t>, Release());
  m.def("relaxed", [](bool on) { return std::exchange(t_relaxed, on); });
  m.def("begin_capture", &begin_capture, pybind11::return_value_policy::reference);
  m.def("end_capture", &end_capture);
  m.def("replay", &replay, Release());
  m.def("recover", &recover, Release());
  m.def("sleep", [](double s) {
    enqueue(current(t_device), KERNEL, "sleep", {}, [s] { usleep(s * 1e6); });
  });
  m.def("delays", [](int kernel, int down, int up, int chance) {
    sim.delay_us = {kernel, down, up};
    sim.chance = chance;
  }, Locked());
  m.def("seed", [](uint64_t seed) {
    sim.seed = seed;
    for (auto& [key, queue] : g_queues) queue->reseed();
  }, Locked());
  m.def("reports", [] { return std::exchange(sim.reports, {}); }, Locked());
  m.def("counts", [] { return std::exchange(sim.counts, {}); }, Locked());
  m.def("contexts", [] { return sim.contexts; }, Locked());
  m.def("forget_contexts", [] { sim.contexts.clear(); }, Locked());
  m.def("fail", [](pybind11::kwargs given) {
    for (auto [name, value] : given) sim.faults[name.cast<std::string>()] = value.cast<long>();
  }, Locked());
  m.def("strict", [](bool on) { sim.strict = on; }, Locked());
}
