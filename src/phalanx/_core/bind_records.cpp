#include "bind_records.hpp"

#include "bind_origin.hpp"

namespace nb = nanobind;

namespace phalanx {

namespace {

// What all kinds of calls have in common.
BoxCall record_of(const Group& group, Op op, const Origin& origin, const Shape& shape, double timeout,
                  Clock::time_point made) {
  const Member& member = group.member();
  BoxCall call;
  call.group = member.box_group;
  call.op = op;
  call.location = member.placed_text;
  call.flags = origin.flags;
  call.shape = &shape;
  call.timeout = timeout;
  call.created = made;
  return call;
}

Origin placed_origin(Group& group, bool is_async) {
  Origin origin = origin_of_call();
  origin.flags |= is_async ? kAsync : 0;
  group.place(origin.location);
  return origin;
}

}  // namespace

void describe(Group& group, CallTicket& ticket, nb::handle sizes, double timeout, bool is_async) {
  Request& request = ticket.request;
  request.shape = shape_of(sizes, request.count);
  request.origin = placed_origin(group, is_async);
  const auto& box = group.member().box;
  if (!box) return;
  BoxCall call = record_of(group, request.op, request.origin, request.shape, timeout, ticket.made);
  call.reduce_op = request.reduce_op;
  call.dtype = static_cast<int>(request.dtype);
  call.peer = request.root;
  call.count = request.count;
  call.bytes_in = request.in.total();
  call.bytes_out = request.out.total();
  ticket.entry = box->begin(call);
}

void describe(Group& group, MessageTicket& ticket, nb::handle sizes, double timeout) {
  // First: it may run code of the program, and other threads with it.
  const Shape shape = shape_of(sizes, ticket.count);
  ticket.origin = placed_origin(group, true);
  const auto& box = group.member().box;
  if (!box) return;
  BoxCall call = record_of(group, ticket.sends ? Op::send : Op::recv, ticket.origin, shape, timeout, ticket.made);
  call.dtype = static_cast<int>(ticket.dtype);
  call.peer = ticket.peer;
  call.tag = ticket.tag;
  call.count = ticket.count;
  (ticket.sends ? call.bytes_in : call.bytes_out) = ticket.data.size;
  ticket.entry = box->begin(call);
}

}  // namespace phalanx
