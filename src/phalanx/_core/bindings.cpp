// The Python module: argument conversion and signals, nothing else.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>

#include "cpus.hpp"
#include "group.hpp"

namespace nb = nanobind;
using namespace phalanx;

namespace {

// How long the core works or waits before Python's signal handlers get their turn.
constexpr std::chrono::milliseconds kBetweenSignals{50};

// What Group.run returns; _native.py names the values.
enum class Result : int {
  finished = 0,
  failed = 1,
  was_broken = 2,
  forked = 3,
  nested = 4,
  busy = 5,
  left = 6,
  no_memory = 7
};

using Addresses = std::vector<std::uint64_t>;

// The kernel for numbers from Python, which may be anything; nullptr where there is none.
ReduceFn kernel_of(int dtype, int op) {
  if (dtype < 0 || dtype >= static_cast<int>(kNumDTypes) || op < 0 || op >= static_cast<int>(kNumReduceOps))
    return nullptr;
  return reduce_kernel(static_cast<DType>(dtype), static_cast<ReduceOp>(op));
}

Nonce to_nonce(const nb::bytes& bytes) {
  Nonce nonce;
  if (bytes.size() != nonce.size()) throw std::invalid_argument("a nonce has 16 bytes");
  std::memcpy(nonce.data(), bytes.c_str(), nonce.size());
  return nonce;
}

// Tensors that only pretend to have memory (fake ones, wrappers, storage that was resized away) have address 0.
struct NoMemory {};

Piece to_piece(std::uint64_t address, std::uint64_t size) {
  if (address == 0 && size > 0) throw NoMemory{};
  return {reinterpret_cast<std::byte*>(address), size};
}

// `num` blocks out of the pieces: listed block by block, or every piece cut evenly.
void fill(Blocks& blocks, const Addresses& addresses, const std::vector<std::uint64_t>& sizes, std::size_t num,
          bool listed) {
  blocks.clear();
  if (num == 0) return;
  thread_local std::vector<Piece> pieces;
  pieces.clear();
  for (std::size_t i = 0; i < addresses.size(); ++i) pieces.push_back(to_piece(addresses[i], sizes[i]));
  if (!listed) return blocks.cut(pieces, num);
  const std::size_t each = pieces.size() / num;
  for (std::size_t block = 0; block < num; ++block) blocks.add_block(pieces.data() + block * each, each);
}

// What the core takes for granted. Users never see these errors: the layers above check and explain before.
void check(const Group& group, int op, int reduce_op, int root, int dtype) {
  if (op < 0 || op >= kNumOps) throw std::invalid_argument("unknown op");
  if (dtype < 0 || dtype >= static_cast<int>(kNumDTypes)) throw std::invalid_argument("unknown dtype");
  const auto kind = static_cast<Op>(op);
  const bool reduces = kind == Op::all_reduce || kind == Op::reduce || kind == Op::reduce_scatter;
  if (reduces && kernel_of(dtype, reduce_op) == nullptr) {
    throw std::invalid_argument("no kernel for this dtype and reduce op");
  }
  const bool rooted = kind == Op::broadcast || kind == Op::reduce || kind == Op::gather || kind == Op::scatter;
  if (rooted && (root < 0 || root >= group.size())) throw std::invalid_argument("root is not a rank of the group");
}

// Without the GIL for its lifetime. Only the main thread may be given back the GIL before the work is done: others have
// no signals to look at, and a thread that asks for the GIL while the interpreter ends is ended by it, half-way.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() {
    while (finalizing() && !on_main_thread()) ::pause();
    PyEval_RestoreThread(state_);
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

  static bool on_main_thread() { return ::syscall(SYS_gettid) == ::getpid(); }

 private:
  static bool finalizing() {
#if PY_VERSION_HEX >= 0x030d0000
    return Py_IsFinalizing() != 0;
#else
    return _Py_IsFinalizing() != 0;
#endif
  }
  PyThreadState* state_;
};

// When to come back for signals.
Clock::time_point next_look() {
  return WithoutGil::on_main_thread() ? Clock::now() + kBetweenSignals : Clock::time_point::max();
}

// Holds the group for one call, unless it is not free in time.
class Hold {
 public:
  Hold(Group& group, Clock::time_point until) : group_(group), held_(group.try_acquire()) {
    while (!held_ && Clock::now() < until) {
      {
        WithoutGil without;
        held_ = group_.acquire(std::min(until, next_look()));
      }
      if (!held_ && PyErr_CheckSignals() != 0) throw nb::python_error();
    }
  }
  ~Hold() {
    if (held_) group_.release();
  }
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;
  explicit operator bool() const { return held_; }

 private:
  Group& group_;
  bool held_;
};

// A call that began and did not come to its end leaves the group in no state to go on.
class AbortUnlessDone {
 public:
  explicit AbortUnlessDone(Group& group) : group_(group) {}
  ~AbortUnlessDone() {
    if (!done_) group_.abort("interrupted in the middle of a call");
  }
  AbortUnlessDone(const AbortUnlessDone&) = delete;
  AbortUnlessDone& operator=(const AbortUnlessDone&) = delete;
  void done() { done_ = true; }

 private:
  Group& group_;
  bool done_ = false;
};

// Starts the request that has been filled in and proceeds to its end.
Result carry_out(Group& group, std::chrono::nanoseconds timeout) {
  AbortUnlessDone guard(group);
  bool started = false;
  while (true) {
    Outcome outcome;
    {
      WithoutGil without;
      if (!started) group.start(timeout);
      started = true;
      outcome = group.proceed(next_look());
    }
    if (outcome != Outcome::pending) {
      guard.done();
      return outcome == Outcome::finished ? Result::finished : Result::failed;
    }
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  }
}

// The part of a request that is the same for all forms of tensors. `fill_blocks` adds the rest.
template <class Fill>
int run_request(Group& group, int op, int reduce_op, int root, int dtype, std::int64_t count, std::uint32_t layout,
                double factor, double timeout, Fill&& fill_blocks) {
  check(group, op, reduce_op, root, dtype);
  if (group.forked()) return static_cast<int>(Result::forked);
  if (group.held_here()) return static_cast<int>(Result::nested);
  const auto limit = std::chrono::duration_cast<std::chrono::nanoseconds>(
      std::chrono::duration<double>(std::clamp(timeout, 0.0, 1e9)));
  Hold hold(group, Clock::now() + limit);
  if (!hold) return static_cast<int>(Result::busy);
  if (group.has_left()) return static_cast<int>(Result::left);
  if (group.broken()) return static_cast<int>(Result::was_broken);
  Request& request = group.request();
  request.op = static_cast<Op>(op);
  request.reduce_op = reduce_op;
  request.root = root;
  request.dtype = static_cast<DType>(dtype);
  request.count = count;
  request.layout = layout;
  request.factor = factor;
  try {
    fill_blocks(request);
  } catch (const NoMemory&) {
    return static_cast<int>(Result::no_memory);
  }
  return static_cast<int>(carry_out(group, limit));
}

int run(Group& group, int op, int reduce_op, int root, int dtype, std::int64_t count, std::uint32_t layout,
        double factor, double timeout, const Addresses& in, const std::vector<std::uint64_t>& in_sizes,
        std::size_t num_in, bool in_listed, const Addresses& out, const std::vector<std::uint64_t>& out_sizes,
        std::size_t num_out, bool out_listed) {
  return run_request(group, op, reduce_op, root, dtype, count, layout, factor, timeout, [&](Request& request) {
    fill(request.in, in, in_sizes, num_in, in_listed);
    fill(request.out, out, out_sizes, num_out, out_listed);
  });
}

// The common case of one tensor, read, written or both, without lists.
int run_single(Group& group, int op, int reduce_op, int root, int dtype, std::int64_t count, std::uint32_t layout,
               double factor, double timeout, std::uint64_t address, std::uint64_t size, bool reads, bool writes) {
  return run_request(group, op, reduce_op, root, dtype, count, layout, factor, timeout, [&](Request& request) {
    const Piece piece = to_piece(address, size);
    request.in.clear();
    request.out.clear();
    if (reads) request.in.add_block(&piece, 1);
    if (writes) request.out.add_block(&piece, 1);
  });
}

nb::dict failure_of(const Group& group) {
  const Failure failure = group.failure();
  nb::dict result;
  const auto listed = std::min<std::size_t>(failure.num_missing, std::size(failure.missing));
  result["kind"] = static_cast<int>(failure.kind);
  result["rank"] = failure.rank;
  result["peer"] = failure.peer;
  result["seq"] = failure.seq;
  result["missing"] = std::vector<int>(failure.missing, failure.missing + listed);
  result["num_missing"] = failure.num_missing;
  result["text"] = nb::str(failure.text);
  return result;
}

nb::tuple describe(Group& group, int rank, std::uint64_t seq) {
  if (rank < 0 || rank >= group.size()) throw std::invalid_argument("no such rank");
  const Descriptor& found = group.segment().descriptor(rank, seq);
  return nb::make_tuple(found.seq, static_cast<int>(found.op), static_cast<int>(found.reduce_op), found.root,
                        static_cast<int>(found.dtype), found.count, found.layout);
}

void reduce_buffers(int dtype, int op, std::uint64_t dst, const Addresses& srcs, std::size_t count,
                    const std::vector<double>& factors) {
  const ReduceFn kernel = kernel_of(dtype, op);
  if (kernel == nullptr) throw std::invalid_argument("no kernel for this dtype and reduce op");
  std::vector<const void*> sources;
  for (const std::uint64_t src : srcs) sources.push_back(reinterpret_cast<const void*>(src));
  if (sources.empty() || factors.size() < sources.size())
    throw std::invalid_argument("one factor a source, at least one source");
  nb::gil_scoped_release nogil;
  kernel(reinterpret_cast<void*>(dst), sources.data(), sources.size(), count, factors.data());
}

}  // namespace

NB_MODULE(_core_ext, m) {
  // Groups end with the interpreter; what is still alive then is unmapped by the kernel.
  nb::set_leak_warnings(false);

  m.def("affinity", &affinity, "CPUs that this process may run on.");
  m.def("cpu_quota", &cpu_quota, "CPUs that the cgroup grants, rounded up; 0 where it sets no limit.");
  m.def("kernel_variant", &kernel_variant);
  m.def("reduces", [](int dtype, int op) { return kernel_of(dtype, op) != nullptr; });
  m.def("reduce_buffers", &reduce_buffers);

  nb::class_<Tuning>(m, "Tuning")
      .def_rw("slot_bytes", &Tuning::slot_bytes)
      .def_rw("chunk_bytes", &Tuning::chunk_bytes)
      .def_rw("one_shot_bytes", &Tuning::one_shot_bytes)
      .def_rw("crowded", &Tuning::crowded)
      .def_rw("spin_us", &Tuning::spin_us);
  m.def("tuning_for", &tuning_for, nb::arg("ranks"), nb::arg("cpus"));

  nb::class_<Segment>(m, "Segment")
      .def_static("create_memfd",
                  [](int size, const Tuning& tuning, const nb::bytes& nonce) {
                    return std::make_shared<Segment>(Segment::create_memfd(size, tuning, to_nonce(nonce)));
                  })
      .def_static("create_file",
                  [](const std::string& path, int size, const Tuning& tuning, const nb::bytes& nonce) {
                    return std::make_shared<Segment>(Segment::create_file(path, size, tuning, to_nonce(nonce)));
                  })
      .def_static("open",
                  [](const std::string& path, const nb::bytes& nonce) {
                    return std::make_shared<Segment>(Segment::open(path, to_nonce(nonce)));
                  })
      .def_prop_ro("fd", &Segment::fd)
      .def_prop_ro("tuning", [](const Segment& segment) { return segment.header().tuning; })
      .def("close_fd", &Segment::close_fd);

  nb::class_<Group>(m, "Group")
      .def(nb::init<std::shared_ptr<Segment>, int>())
      .def("run", &run)
      .def("run_single", &run_single)
      .def("abort", &Group::abort)
      .def("leave", &Group::leave)
      .def("failure", &failure_of)
      .def("describe", &describe)
      .def_prop_ro("forked", &Group::forked)
      .def_prop_ro("broken", &Group::broken)
      .def_prop_ro("seq", &Group::seq);

  m.attr("MAX_RANKS") = kMaxRanks;
}
