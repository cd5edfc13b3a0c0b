//! The training loop, on one rank and on many.

mod averaging;
mod balanced;
mod buffers;
mod choices;
mod common;
mod context;
mod control;
mod doors;
mod elastic;
mod elastic_newcomers;
mod elastic_plans;
mod elastic_saves;
mod evaluation;
mod experts;
mod failures;
mod faults;
mod faults_joins;
mod faults_plans;
mod intervals;
mod kills;
mod local_updates;
mod order;
mod pipelines;
mod policies;
mod prelude;
mod qk_clip;
mod remembered;
mod replays;
mod replays_found;
mod replays_resumed;
mod resuming;
mod saving;
mod signals;
mod tensor;
#[path = "../../../distributed/tests/all/worlds.rs"]
mod worlds;
