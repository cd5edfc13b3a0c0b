// The tests of what every engine must do, included in the root of an engine's program. There `comm` is this program:
// all of the crate, with `Ranks` of the engine, which its module `start` starts, in place of ranks that are threads.

pub use ranks::Ranks;
pub use start::comm::*;

#[path = "../all/collectives.rs"]
mod collectives;
#[path = "../all/collectives_types.rs"]
mod collectives_types;
#[path = "../all/faults.rs"]
mod faults;
#[path = "../all/in_order.rs"]
mod in_order;
#[allow(dead_code, reason = "other suites use the rest")]
mod ranks;
