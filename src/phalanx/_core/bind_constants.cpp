#include "bind_constants.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include <array>
#include <chrono>
#include <string_view>
#include <utility>

#include "box_format.hpp"
#include "call.hpp"
#include "lane.hpp"
#include "refusal_notes.hpp"
#include "ticket.hpp"

namespace nb = nanobind;

namespace phalanx {

namespace {

template <std::size_t kNum>
nb::tuple rows_of(const std::array<Field, kNum>& fields) {
  nb::list rows;
  for (const Field& each : fields) rows.append(nb::make_tuple(each.name, each.offset, each.format()));
  return nb::tuple(rows);
}

template <std::size_t kNum>
nb::tuple names_of(const std::array<std::string_view, kNum>& names) {
  nb::list all;
  for (const std::string_view name : names) all.append(name);
  return nb::tuple(all);
}

double seconds(std::chrono::milliseconds time) { return std::chrono::duration<double>(time).count(); }

class Constants {
 public:
  explicit Constants(nb::module_& module) : module_(module) {}
  template <class Number>
  Constants& add(const char* name, Number value) {
    module_.attr(name) = static_cast<std::int64_t>(value);
    return *this;
  }

 private:
  nb::module_& module_;
};

}  // namespace

void bind_constants(nb::module_& module) {
  Constants constants(module);
  constants.add("FINISHED", Result::finished)
      .add("FAILED", Result::failed)
      .add("WAS_BROKEN", Result::was_broken)
      .add("FORKED", Result::forked)
      .add("NESTED", Result::nested)
      .add("LEFT", Result::left)
      .add("NO_MEMORY", Result::no_memory)
      .add("PENDING", Result::pending)
      .add("NO_SPACE", Result::no_space)
      .add("NOT_WRITABLE", Result::not_writable);
  constants.add("FAILURE_NONE", FailureKind::none)
      .add("FAILURE_MISMATCH", FailureKind::mismatch)
      .add("FAILURE_TIMEOUT", FailureKind::timeout)
      .add("FAILURE_ABORTED", FailureKind::aborted)
      .add("FAILURE_LEFT", FailureKind::left)
      .add("FAILURE_LOST", FailureKind::lost)
      .add("FAILURE_MESSAGE", FailureKind::message);
  constants.add("LEAVING_NO", Leaving::no)
      .add("LEAVING_CLOSED", Leaving::closed)
      .add("LEAVING_EXITING", Leaving::exiting)
      .add("LEAVING_REPLACED", Leaving::replaced);
  constants.add("REST_NOTHING", Lane::Rest::nothing)
      .add("REST_MOVING", Lane::Rest::moving)
      .add("REST_WAITING", Lane::Rest::waiting);
  constants.add("CHECK_OFF", Check::off).add("CHECK_ON", Check::on).add("CHECK_FULL", Check::full);
  constants.add("ASYNC", kAsync).add("IN_BACKWARD", kInBackward).add("BY_REDUCER", kByReducer);
  constants.add("NO_REDUCE_OP", kNoReduceOp)
      .add("NO_RANK", kNoRank)
      .add("ANY_SOURCE", kAnySource)
      .add("ANY_COUNT", kAnyCount)
      .add("UNKNOWN_PEER", kUnknownPeer)
      .add("UNKNOWN_TAG", kUnknownTag)
      .add("UNKNOWN_STATUS", kUnknownStatus)
      .add("NO_DTYPE", DType::none)
      .add("MAX_RANKS", kMaxRanks)
      .add("SIZES_KEPT", kSizesKept)
      .add("INLINE_BYTES", kInlineBytes)
      .add("ENVELOPES", kEnvelopes);

  constants.add("RECORD_CALL", RecordKind::call).add("RECORD_MAKING", RecordKind::making);
  constants.add("STATE_SCHEDULED", CallState::scheduled)
      .add("STATE_STARTED", CallState::started)
      .add("STATE_COMPLETED", CallState::completed)
      .add("STATE_FAILED", CallState::failed);
  constants.add("BOX_RUNNING", BoxEnding::running)
      .add("BOX_ENDED_WELL", BoxEnding::well)
      .add("BOX_FAILED", BoxEnding::failed);
  constants.add("ENDING_UNKNOWN", Ending::unknown)
      .add("ENDING_EXIT", Ending::exit)
      .add("ENDING_EXCEPTION", Ending::exception)
      .add("ENDING_CONSEQUENCE", Ending::consequence);
  constants.add("BOX_VERSION", kBoxVersion).add("BOX_HEADER_BYTES", kPage).add("BOX_MOST_DEATHS", kMostDeaths);
  module.attr("MISMATCH_GRACE") = seconds(kMismatchGrace);
  module.attr("REFUSAL_GRACE") = seconds(kRefusalGrace);
  module.attr("BOX_MARKING") = kMarking;
  module.attr("BOX_MAGIC") = nb::bytes(kBoxMagic, sizeof(kBoxMagic) - 1);
  module.attr("BOX_DIVIDER") = std::string_view(&kDivider, 1);
  module.attr("BOX_HEADER_FIELDS") = rows_of(kBoxHeaderFields);
  module.attr("BOX_DEATH_FIELDS") = rows_of(kBoxDeathFields);
  module.attr("BOX_GROUP_FIELDS") = rows_of(kBoxGroupFields);
  module.attr("BOX_RECORD_FIELDS") = rows_of(kBoxRecordFields);
  module.attr("REDUCE_OPS") = names_of(kReduceOpNames);
  module.attr("DEVICES") = names_of(kDeviceNames);
  module.attr("ENGINES") = names_of(kEngineNames);
}

}  // namespace phalanx
