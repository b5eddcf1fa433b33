#include "bind_box.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "bind_origin.hpp"
#include "exit_status.hpp"
#include "peer_watch.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace phalanx {

namespace {

// A call of a rank that is a thread.
std::uint64_t begin(const HeldBox& held, std::uint32_t group, const Description& description, std::uint64_t bytes_in,
                    std::uint64_t bytes_out, double timeout, bool is_async) {
  if (held.box->forked()) return 0;
  const Origin origin = origin_of_call();
  BoxCall record;
  record.call = description;
  record.call.device = description.dtype != DType::none ? Device::cpu : Device::none;
  record.call.engine = Engine::threads;
  record.call.flags = origin.flags | (is_async ? kAsync : 0);
  record.group = group;
  record.location = origin.location != nullptr ? held.box->offset_of(*origin.location) : 0;
  record.bytes_in = bytes_in;
  record.bytes_out = bytes_out;
  record.timeout = timeout;
  record.created = Clock::now();
  return held.box->begin(record).id();
}

// That of a group. `number` is that of the meeting.
std::uint64_t begin_making(const HeldBox& held, std::uint32_t group, std::uint64_t number, double timeout) {
  if (held.box->forked()) return 0;
  BoxCall record;
  record.kind = RecordKind::making;
  record.group = group;
  record.seq = number;
  record.timeout = timeout;
  record.created = Clock::now();
  const Origin origin = origin_of_call();
  record.location = origin.location != nullptr ? held.box->offset_of(*origin.location) : 0;
  record.call.flags = origin.flags;
  const BoxEntry entry = held.box->begin(record);
  entry.start(record.created);
  return entry.id();
}

void blame(const HeldBox& held, std::uint64_t record, int failure, int rank) {
  Failure found{};
  found.kind = static_cast<FailureKind>(failure);
  found.peer = found.rank = rank;
  held.box->entry(record).blame(found);
}

void watch_in_making(const HeldBox& held, std::int64_t pid, std::uint64_t start, std::uint64_t program, int job_rank,
                     const std::string& folder) {
  const auto peer = Peer::watch({static_cast<pid_t>(pid), start, program});
  if (peer && !held.box->forked()) peer_watch().add_to_making(peer, job_rank, held.box, folder);
}

}  // namespace

void bind_box(nb::module_& module, nb::class_<GroupEnd>& group) {
  nb::class_<HeldBox>(module, "BlackBox", "The last calls of this process, in a file, or in memory where `fd` is -1.")
      .def(
          "__init__",
          [](HeldBox* self, int fd, std::uint32_t capacity, int rank, int world_size, const std::string& program) {
            new (self) HeldBox{std::make_shared<BlackBox>(fd, capacity, rank, world_size, program)};
          },
          "fd"_a, "capacity"_a, "rank"_a, "world_size"_a, "program"_a)
      .def(
          "remember_group",
          [](const HeldBox& self, std::string name, int rank, std::string ranks, std::string description,
             std::string identity, std::string venue) {
            return self.box->remember_group({std::move(name), std::move(description), std::move(identity),
                                             std::move(venue), std::move(ranks), rank});
          },
          "name"_a, "rank"_a, "ranks"_a, nb::kw_only(), "description"_a = "", "identity"_a = "", "venue"_a = "",
          "The group, for `begin`, `begin_making` and `GroupEnd.keep_records`; 0: there is no room for it.")
      .def("begin", &begin, "group"_a, "description"_a, nb::kw_only(), "bytes_in"_a, "bytes_out"_a, "timeout"_a,
           "is_async"_a, "Records a call of a rank that is a thread.")
      .def("begin_making", &begin_making, "group"_a, "number"_a, "timeout"_a)
      .def(
          "number",
          [](const HeldBox& self, std::uint64_t record, std::uint64_t seq) { self.box->entry(record).number(seq); },
          "record"_a, "seq"_a)
      .def(
          "start", [](const HeldBox& self, std::uint64_t record) { self.box->entry(record).start(Clock::now()); },
          "record"_a)
      .def(
          "came_from",
          [](const HeldBox& self, std::uint64_t record, int sender) { self.box->entry(record).came_from(sender); },
          "record"_a, "sender"_a)
      .def(
          "end",
          [](const HeldBox& self, std::uint64_t record, bool well, int last_arriver) {
            self.box->entry(record).end(well, Clock::now(), last_arriver);
          },
          "record"_a, "well"_a, "last_arriver"_a = kNoRank)
      .def("blame", &blame, "record"_a, "failure"_a, "rank"_a)
      .def(
          "set_rank", [](const HeldBox& self, int rank, int size) { self.box->set_rank(rank, size); }, "rank"_a,
          "world_size"_a)
      .def(
          "say_end",
          [](const HeldBox& self, int how, const std::string& exception, std::int64_t ns) {
            self.box->say_end(static_cast<Ending>(how), exception, Clock::time_point(std::chrono::nanoseconds(ns)));
          },
          "how"_a, "exception"_a, "ns"_a)
      .def("watch_in_making", &watch_in_making, "pid"_a, "start"_a, "program"_a, "job_rank"_a, "folder"_a)
      .def("tell_exit_status", [](const HeldBox& self) { tell_exit_status(self.box); })
      .def(
          "move_to", [](const HeldBox& self, int fd) { self.box->move_to(fd); }, "fd"_a)
      .def("contents", [](const HeldBox& self) {
        const std::string contents = self.box->contents();
        return nb::bytes(contents.data(), contents.size());
      });

  group
      .def(
          "keep_records",
          [](GroupEnd& self, const HeldBox& held, std::uint32_t group, const std::string& path) {
            self.keep_records(held.box, group, path);
          },
          "box"_a, "group"_a, "path"_a)
      .def(
          "watch_deaths",
          [](GroupEnd& self, const HeldBox& held, const std::vector<int>& job_ranks, const std::string& folder) {
            self.watch_deaths(held.box, job_ranks, folder);
          },
          "box"_a, "job_ranks"_a, "folder"_a);
}

}  // namespace phalanx
