#include "bind_records.hpp"

#include "bind_origin.hpp"

namespace nb = nanobind;

namespace phalanx {

namespace {

// What all kinds of calls have in common.
BoxCall record_of(const GroupEnd& group, const Description& call, double timeout, Clock::time_point made) {
  const Member& member = group.member();
  BoxCall record;
  record.group = member.box_group;
  record.call = call;
  record.location = member.location_text_in_box;
  record.timeout = timeout;
  record.created = made;
  return record;
}

// Notes where the program makes the call, how it came there, and who moves its bytes.
const Location* note_origin(GroupEnd& group, Description& call, bool is_async) {
  const Origin origin = origin_of_call();
  call.engine = Engine::shm;
  call.flags = origin.flags | (is_async ? kAsync : 0);
  group.publish_location(origin.location);
  return origin.location;
}

}  // namespace

void record_call(GroupEnd& group, CallTicket& ticket, double timeout, bool is_async) {
  Request& request = ticket.request;
  request.location = note_origin(group, request, is_async);
  const auto& box = group.member().box;
  if (!box) return;
  BoxCall record = record_of(group, request, timeout, ticket.made);
  record.bytes_in = request.in.total();
  record.bytes_out = request.out.total();
  ticket.entry = box->begin(record);
}

void record_call(GroupEnd& group, MessageTicket& ticket, double timeout) {
  ticket.location = note_origin(group, ticket.call, true);
  const auto& box = group.member().box;
  if (!box) return;
  BoxCall record = record_of(group, ticket.call, timeout, ticket.made);
  (ticket.sends() ? record.bytes_in : record.bytes_out) = ticket.data.size;
  ticket.entry = box->begin(record);
}

}  // namespace phalanx
