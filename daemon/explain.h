// What each decode grouping would store, move and cost for one request, by the layout's and the meter's
// arithmetic.
#pragma once

#include "controlplane/control_plane.h"
#include "daemon/request_book.h"
#include "proto/control.pb.h"
#include "proto/worker.pb.h"

namespace weft::daemon {

// One line for each decode grouping and index placement that the request could have; the present one is
// marked. For a request that has ended nothing is marked and a change has no price. Where it has decoded, the
// time of its latest step is told.
void fill_costs(const RequestRecord& record, const controlplane::ControlPlane& plane,
                const wire::ModelDescription& model,
                google::protobuf::RepeatedPtrField<wire::GroupingCost>* to);

// One line for each way to exchange what its decode steps need, the others as asked; those it has are marked.
// None where nothing is exchanged.
void fill_mechanisms(const RequestRecord& record, const controlplane::ControlPlane& plane,
                     const wire::ModelDescription& model,
                     google::protobuf::RepeatedPtrField<wire::MechanismCost>* to);

}  // namespace weft::daemon
