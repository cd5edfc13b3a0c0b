//! Names that most tests use.

pub use std::{
    cell::Cell,
    collections::{BTreeMap, BTreeSet},
    ops::Range,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    slice::from_ref,
    sync::{
        Arc, Barrier, Mutex,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

pub use adaptive::{
    balance::{BalanceOptions, Balanced, BatchRanges},
    elastic::{Elastic, ElasticWorld},
    local_updates::{DiLoCo, ElasticAveraging, LocalSgd, LocalSteps, LocalUpdates, OuterRule, SlowMo, lost_at_resize},
    powersgd::PowerSgd,
};
pub use autograd::{
    BackwardHook, Function, Leaf, Var, apply_function, autocast, backward, differentiable_grad, grad, is_grad_enabled,
    manual_seed, no_grad,
};
pub use data::{InMemory, Loader};
pub use distributed::{
    buckets::{AllReduce, BucketLimits, BucketOptions, GradCompression, Unused},
    checkpoint::{CheckpointPart, CheckpointReader, Checkpointed, Folder, Wanted},
    combinations::{Feature, Features},
    comm::{
        Collective, Collectives, Comm, Communicator, CountingCommunicator, Fault, FaultyCommunicator, Group,
        Guarantees, InOrderCommunicator, NoOpCommunicator, Quorum, Ranks, ReduceOp, Traffic, Work,
    },
    compat::Ddp,
    context_parallel::{ContextExchange, ContextRanks},
    ddp::DataParallel,
    mesh::{AsMesh, Mesh},
    pipeline::{
        Checked, Costs, Direction, Limits, Lowering, Message, MicroBatches, Pipeline, PipelineGroups, PipelineModel,
        PipelineOptions, Schedule, ScheduleKind, SendMode, Span, Stage, StageHooks, Tie, UnitOp,
    },
    plan::{Axis, ParallelPlan},
    sampler::shard_batches,
    strategy::ActiveRanks,
    train::{CheckpointNotes, HyperParameters, Loss, TrainStep, TrainStepBuilder, TrainingConfig, TrainingMetrics},
    zero::{Sharded, StatePlace, UnitOf, ZeroOptions, ZeroStage},
};
pub use nn::{
    Activation, BatchNorm, Block, CountedRows, Dropout, Embedding, EncoderBlock, EncoderBlockConfig, Forward, Gpt,
    GptConfig, GroupedQueryAttention, GroupedQueryConfig, Init, Linear, Module, ModuleExt, Param, RmsNorm, Sequential,
    Tanh, Visitor,
    loss::{cross_entropy_with, mse},
    moe::{Capacity, DropBy, MixtureOfExperts, MoeConfig, RouterScores},
    parallel::{ContextAttention, ContextSlot, CutLayer, Cuts, SequencePart, TensorPlan, VocabularyLoss},
    set_counted_rows,
};
pub use numcore::{
    DType, Error, ErrorKind, MemoryCategory, NullRuntime, Result, Runtime, Tensor, TensorMut,
    fused::{AttentionProgram, CrossEntropyOptions, NnOps, Reduction, SdpaOptions},
    ops::{Apply, Backprop, IndexOps, PointwiseOps, ReduceOps, ViewOps},
    placement::TensorPlacement,
    rng::Philox,
};
pub use optim::{
    AdafactorConfig, AdagradConfig, AdamW, AdamWConfig, AdanConfig, Combined, Elementwise, FlatGradients,
    FlatOptimizer, IntoOptimizer, LambConfig, LbfgsConfig, LionConfig, LossScaler, Muon, MuonConfig, Optimizer,
    OptimizerCore, ParamGroups, ProdigyConfig, Sgd, SgdConfig, UpdateRule,
};
pub use runtime_cpu::Cpu;

pub use crate::{
    checkpoint_common::{Any, STAGES, Scratch},
    common::{
        EXAMPLES, GradientSums, Mlp, STEPS, Task, Trace, Turns, WORLDS, adamw, bucketed, close, config, cpu,
        data_parallel, difference, everywhere, half, lamb, larger, muon, own, pipelined, prodigy, refused, set, sgd,
        sharded, sharded_pipeline, shards, simple, single, weights,
    },
    outcome::{Pieces, RunOutcome, assembled, contents, distance, pieces},
    training::Training,
    way::{CLOSE, Kind, Rule, Stages, Way},
};
