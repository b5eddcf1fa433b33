// The Python module: argument conversion, nothing else. Calls are in bind_calls.cpp.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <system_error>
#include <tuple>

#include "bind_agreement.hpp"
#include "bind_box.hpp"
#include "bind_calls.hpp"
#include "bind_constants.hpp"
#include "bind_debug.hpp"
#include "bind_description.hpp"
#include "bind_segment.hpp"
#include "bind_tables.hpp"
#include "bind_waits.hpp"
#include "cpus.hpp"
#include "front.hpp"
#include "gil.hpp"
#include "group_end.hpp"
#include "memory.hpp"
#include "progress.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace phalanx;

namespace {

using Addresses = std::vector<std::uint64_t>;
Nonce to_nonce(const nb::bytes& bytes) {
  Nonce nonce;
  if (bytes.size() != nonce.size()) throw std::invalid_argument("a nonce has 16 bytes");
  std::memcpy(nonce.data(), bytes.c_str(), nonce.size());
  return nonce;
}

// The rank of each seat; without it, rank r has seat r.
using Ranks = std::optional<std::vector<std::int32_t>>;

Seating to_seating(int size, const Ranks& ranks) {
  if (size < 1 || size > kMaxRanks)
    throw std::invalid_argument("expected 1 to " + std::to_string(kMaxRanks) + " ranks");
  if (!ranks) return Seating(size);
  std::optional<Seating> seating = Seating::of(*ranks);
  if (!seating || seating->size() != size) throw std::invalid_argument("expected each rank in one seat");
  return *std::move(seating);
}

void reduce_buffers(int dtype, int op, std::uint64_t dst, const Addresses& srcs, std::size_t count,
                    const std::vector<double>& factors, std::uint64_t carry_in, std::uint64_t carry_out,
                    std::size_t num_srcs) {
  const ReduceFn kernel = kernel_of(dtype, op);
  if (kernel == nullptr) throw std::invalid_argument("no kernel for this dtype and reduce op");
  std::vector<const void*> sources;
  for (const std::uint64_t src : srcs) sources.push_back(reinterpret_cast<const void*>(src));
  if ((sources.empty() && carry_in == 0) || factors.size() < sources.size())
    throw std::invalid_argument("expected one factor per source, and at least one source or a carry");
  const bool is_part = carry_in != 0 || carry_out != 0;
  if (is_part && num_srcs < sources.size()) throw std::invalid_argument("expected the number of sources of all parts");
  const Carry carry{reinterpret_cast<const void*>(carry_in), reinterpret_cast<void*>(carry_out), num_srcs};
  const WithoutGil without;
  kernel(reinterpret_cast<void*>(dst), sources.data(), sources.size(), count, factors.data(),
         is_part ? &carry : nullptr);
}

// What Python holds of the statistics: as MappedSegment.
struct HeldStatistics {
  std::shared_ptr<const Statistics> statistics;
};

// Of each op that was called: its number, calls, bytes, seconds waiting and seconds moving.
nb::list sums_of(const HeldStatistics& held) {
  const auto seconds = [](std::chrono::nanoseconds time) { return std::chrono::duration<double>(time).count(); };
  nb::list sums;
  for (std::size_t op = 0; op < Statistics::kOps && !held.statistics->forked(); ++op) {
    const Statistics::Sum sum = held.statistics->of(static_cast<Op>(op));
    if (sum.calls == 0) continue;
    sums.append(nb::make_tuple(op, sum.calls, sum.bytes, seconds(sum.waiting), seconds(sum.moving)));
  }
  return sums;
}

// An OSError, whose number tells which limit was hit, and a RuntimeError, like all other errors of the core.
void translate(const std::exception_ptr& caught, void* system_error) {
  try {
    std::rethrow_exception(caught);
  } catch (const std::system_error& error) {
    auto* type = static_cast<PyObject*>(system_error);
    nb::object made = nb::steal(PyObject_CallFunction(type, "s", error.what()));
    if (!made.is_valid()) return;
    made.attr("errno") = error.code().value();
    PyErr_SetObject(type, made.ptr());
  }
}

MappedSegment mapped(Segment segment) { return {std::make_shared<Segment>(std::move(segment))}; }

}  // namespace

NB_MODULE(_core_ext, m) {
  const nb::object kinds = nb::make_tuple(nb::handle(PyExc_OSError), nb::handle(PyExc_RuntimeError));
  m.attr("CoreError") = nb::steal(PyErr_NewException("phalanx._core_ext.CoreError", kinds.ptr(), nullptr));
  nb::register_exception_translator(&translate, nb::object(m.attr("CoreError")).release().ptr());
  // Groups end with the interpreter; what is still alive then is unmapped by the kernel.
  nb::set_leak_warnings(false);

  bind_tables(m);
  bind_description(m);
  m.def("affinity", &affinity, "CPUs that this process may run on.");
  m.def("cpu_quota", &cpu_quota, "CPUs that the cgroup grants, rounded up; 0 where it sets no limit.");
  m.def("kernel_variant", &kernel_variant);
  m.def(
      "writable",
      [](std::uint64_t address, std::uint64_t size) { return writable({reinterpret_cast<std::byte*>(address), size}); },
      "address"_a, "size"_a);
  m.def("progress_error", [] { return progress().error(); });
  m.def("reduces", [](int dtype, int op) { return kernel_of(dtype, op) != nullptr; }, "dtype"_a, "op"_a);
  m.def("reduce_buffers", &reduce_buffers, "dtype"_a, "op"_a, "dst"_a, "srcs"_a, "count"_a, "factors"_a,
        "carry_in"_a = 0, "carry_out"_a = 0, "num_srcs"_a = 0,
        "With a carry: one part of a reduction of `num_srcs` sources, whose running values go from part to part.");
  m.def("accumulator_size", [](int dtype) { return accumulator_size(static_cast<DType>(dtype)); }, "dtype"_a);

  nb::class_<Tuning>(m, "Tuning")
      .def_rw("slot_bytes", &Tuning::slot_bytes)
      .def_rw("chunk_bytes", &Tuning::chunk_bytes)
      .def_rw("one_shot_bytes", &Tuning::one_shot_bytes)
      .def_rw("message_chunk_bytes", &Tuning::message_chunk_bytes)
      .def_prop_rw(
          "level", [](const Tuning& self) { return static_cast<int>(self.check); },
          [](Tuning& self, int check) { self.check = static_cast<Check>(check); })
      .def_prop_rw(
          "only_posts", [](const Tuning& self) { return self.purpose == Purpose::posting; },
          [](Tuning& self, bool only_posts) { self.purpose = only_posts ? Purpose::posting : Purpose::moving; })
      .def_rw("crowded", &Tuning::crowded)
      .def_rw("spin_us", &Tuning::spin_us);
  m.def("tuning_for", &tuning_for, "ranks"_a, "cpus"_a);

  nb::class_<MappedSegment>(m, "Segment")
      .def_static(
          "create_memfd",
          [](int size, const Tuning& tuning, const nb::bytes& nonce, const Ranks& ranks) {
            return mapped(Segment::create_memfd(to_seating(size, ranks), tuning, to_nonce(nonce)));
          },
          "size"_a, "tuning"_a, "nonce"_a, "ranks"_a = nb::none(), "`ranks` has the rank of each seat.")
      .def_static(
          "create_file",
          [](const std::string& path, int size, const Tuning& tuning, const nb::bytes& nonce, const Ranks& ranks) {
            return mapped(Segment::create_file(path, to_seating(size, ranks), tuning, to_nonce(nonce)));
          },
          "path"_a, "size"_a, "tuning"_a, "nonce"_a, "ranks"_a = nb::none(), "The same.")
      .def_static(
          "open",
          [](const std::string& path, const nb::bytes& nonce, int size) {
            return mapped(Segment::open(path, to_nonce(nonce), size));
          },
          "path"_a, "nonce"_a, "size"_a)
      .def_static(
          "create_private",
          [](int size, const Tuning& tuning) {
            return mapped(Segment::create_private(to_seating(size, std::nullopt), tuning));
          },
          "size"_a, "tuning"_a, "Of this process alone, for ranks that are threads.")
      .def_prop_ro("fd", [](const MappedSegment& self) { return self.segment->fd(); })
      .def_prop_ro("tuning", [](const MappedSegment& self) { return self.segment->header().tuning; })
      .def_prop_ro(
          "ranks", [](const MappedSegment& self) { return self.segment->seating().ranks(); }, "By seat.")
      .def("close_fd", [](const MappedSegment& self) { self.segment->close_fd(); });

  m.def("own_identity", [] {
    const Identity identity = own_identity();
    return std::pair<std::int64_t, std::uint64_t>{identity.pid, identity.start};
  });
  m.def("own_program", [] { return own_identity().program; }, "Tells this program from one that replaces it by exec.");
  nb::class_<Peer>(m, "Peer")
      .def_static(
          "watch",
          [](std::int64_t pid, std::uint64_t start, std::uint64_t program) {
            return Peer::watch(to_identity({pid, start, program}));
          },
          "pid"_a, "start"_a, "program"_a = 0,
          nb::sig("def watch(pid: int, start: int, program: int = 0) -> Peer | None"))
      .def_prop_ro("dead", &Peer::dead)
      .def_prop_ro("ending", &Peer::ending)
      .def_prop_ro("replaced_by",
                   [](const Peer& self) {
                     return self.replaced() ? std::optional<std::string>(self.command_line()) : std::nullopt;
                   })
      .def_prop_ro("status", &Peer::status);

  nb::class_<HeldStatistics>(m, "Statistics")
      .def("read", &sums_of, nb::sig("def read(self) -> list[tuple[int, int, int, float, float]]"),
           "Of each op that was called: its number, calls, bytes, seconds waiting and seconds moving.");

  auto group = nb::class_<GroupEnd>(m, "GroupEnd");
  group
      .def(
          "__init__",
          [](GroupEnd* self, const MappedSegment& mapped, int rank) { new (self) GroupEnd(mapped.segment, rank); },
          "segment"_a, "rank"_a)
      .def(
          "watch",
          [](GroupEnd& self, const std::vector<Pid>& processes) {
            if (processes.size() != static_cast<std::size_t>(self.size()))
              throw std::invalid_argument("expected one process per rank");
            self.watch(to_identities(processes));
          },
          "processes"_a, "One per rank: pid, start time and program.")
      .def("abort", &GroupEnd::abort, "reason"_a, nb::call_guard<WithoutGil>())
      .def(
          "leave",
          [](GroupEnd& self, bool exiting) {
            const WithoutGil without;
            self.leave(exiting ? Leaving::exiting : Leaving::closed);
          },
          "exiting"_a)
      .def("say_last_words", &GroupEnd::say_last_words, "text"_a)
      .def("last_words", &GroupEnd::last_words, "rank"_a)
      .def("failure", &GroupEnd::failure)
      .def_prop_ro("statistics", [](const GroupEnd& self) { return HeldStatistics{self.member().statistics}; })
      .def_prop_ro(
          "ranks", [](GroupEnd& self) { return self.segment().seating().ranks(); },
          "The rank of each seat in the segment.")
      .def_prop_ro("forked", &GroupEnd::forked)
      .def_prop_ro("broken", &GroupEnd::broken)
      .def_prop_ro("seq", &GroupEnd::seq);

  bind_calls(m, group);
  bind_debug(m, group);
  bind_waits(m, group);
  bind_box(m, group);
  bind_agreement(m);
  bind_local_agreement(m);
  bind_constants(m);
  bind_front(m);
}
