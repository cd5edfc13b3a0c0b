//! Names that most tests use.

pub use std::{
    cell::RefCell,
    rc::Rc,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    thread::sleep,
    time::Duration,
};

pub use adaptive::elastic::{Elastic, ElasticWorld};
pub use autograd::Var;
pub use data::{Batch, Loader};
pub use distributed::{
    checkpoint::Folder,
    comm::{Comm, Communicator, Quorum, Ranks},
    mesh::Mesh,
    plan::{Axis, ParallelPlan},
    train::{Loss, Step, TrainStep, TrainingConfig},
    zero::{UnitOf, ZeroOptions, ZeroStage},
};
pub use nn::{Forward, Init, Linear, Module, ModuleExt, parallel::TensorPlan};
pub use numcore::{
    DType, Error, Result, Runtime,
    ops::{PointwiseOps, ReduceOps, ViewOps},
};
pub use runtime_cpu::Cpu;
pub use train::{
    Callback, Checkpoints, EarlyStop, EqualWeights, Evaluate, Event, Interval, Length, Monitor, NonFinite, Record,
    Resume, Run, Sink, StopReason, Trainer, WeightAveraging, record_scalar, sink::Value,
};
