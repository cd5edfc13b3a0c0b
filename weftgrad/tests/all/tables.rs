//! The names in the tables of the book are those of the crates, and the prelude brings every operation.

use std::{collections::BTreeSet, fs, path::PathBuf};

fn text(path: &str) -> String {
    fs::read_to_string(PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..").join(path)).unwrap()
}

/// The paths of types, variants, functions and modules in the code of a page's tables. Of the page that compares
/// frameworks, the names of types without a path too, and only from the column about this one.
fn named(page: &str) -> BTreeSet<String> {
    let compares = page == "coming-from.md";
    let is_name = |word: &&str| {
        let is_type = word.starts_with(char::is_uppercase) && word.contains(char::is_lowercase);
        word.contains("::") || compares && is_type
    };
    let mut names = BTreeSet::new();
    for row in text(&format!("docs/book/src/{page}")).lines().filter(|line| line.starts_with('|')) {
        let row = row.trim_end_matches('|');
        let cell = if compares { row.rsplit(" | ").next().unwrap_or_default() } else { row };
        for code in cell.split('`').skip(1).step_by(2) {
            let words =
                code.split(|c: char| !(c.is_alphanumeric() || "_:".contains(c))).map(|word| word.trim_matches(':'));
            names.extend(words.filter(is_name).map(without_method));
        }
    }
    // The standard library's, and one of the page's own.
    names.retain(|name| !["Default", "Net", "None"].contains(&name.as_str()));
    names
}

/// The path of the type alone, of that of a method.
fn without_method(path: &str) -> String {
    match path.rsplit_once("::") {
        Some((of, last)) if last.starts_with(char::is_lowercase) => {
            let is_type = of.rsplit("::").next().is_some_and(|name| name.starts_with(char::is_uppercase));
            if is_type { of.into() } else { path.into() }
        }
        _ => path.into(),
    }
}

/// Imports each name from a scope, and compares the names with those in the tables of a page.
macro_rules! page {
    ($page:literal: $scope:item $($($part:ident)::+),*) => {{
        #[allow(unused_imports)]
        mod names {
            $scope
            $(use $($part)::+ as _;)*
        }
        let known = [$(stringify!($($part)::+)),*].map(|name| name.replace(' ', ""));
        assert_eq!(named($page), BTreeSet::from(known), "{}", $page);
    }};
}

#[test]
fn tables_name_what_there_is() {
    page! { "coming-from.md":
        use weftgrad::{adaptive::{balance::*, elastic::*, local_updates::*}, fused, linalg, prelude::*, process};
        AdamW, AdamWConfig, BackwardHook, BalancePolicy::FollowSpeeds, BalancePolicy::Sync, Balanced, Checkpoint, ConvOptions,
        DType::BF16, DType::F32, DType::F8E4M3, DType::I64, DiLoCo, Elastic, ElasticWorld, Ellipsis, Forward, Launcher, LocalSgd,
        LocalSteps, Mesh, Module, NewAxis, ParallelPlan, ReduceOp::Sum, Runtime, SlowMo, Tensor, TensorMut, TrainStep,
        Var, ZeroStage::Gradients, ZeroStage::Optimizer, ZeroStage::Parameters, autograd::Function,
        autograd::apply_function, autograd::detect_anomaly, autograd::differentiable_grad, autograd::jvp, autograd::per_example_gradients, data::Dataset, data::Loader,
        data::tokens::TokenFile, distributed::comm::Quorum, distributed::compat::Ddp, distributed::pipeline::PipelineModel,
        distributed::pipeline::ScheduleKind::OneFOneB, distributed::train::HyperParameters::Restored, fused::AttentionProgram, linalg::solve,
        nn::Bilinear, nn::BlockScaling, nn::DropUnit::Channel, nn::DropUnit::Example, nn::Dropout, nn::EmbeddingBag, nn::Gpt, nn::Hooked, nn::Init,
        nn::InstanceNorm, nn::Linear, nn::Sequential, nn::SpectralNorm, nn::WeightNorm, nn::block_scaled, nn::functional_call, nn::loss::BinaryOptions, nn::loss::CtcOptions, nn::loss::bce_with_logits_by, nn::loss::cosine_embedding, nn::loss::cross_entropy, nn::loss::ctc, nn::loss::gaussian_nll, nn::loss::hinge_embedding, nn::loss::linear_cross_entropy, nn::loss::margin_ranking, nn::loss::mse, nn::loss::poisson_nll, nn::loss::soft_cross_entropy, nn::loss::soft_margin, nn::loss::triplet, nn::under,
        ops::cat, ops::einsum, ops::stack, optim::Cosine, optim::EvaluationWeights, optim::Lbfgs, optim::LossScaler, optim::ParamGroups, optim::Prodigy, optim::ScheduleFreeAdamW, optim::Shampoo, optim::Soap, optim::StepLr,
        optim::WarmupCosine, optim::clip_grad_norm, train::Checkpoints, train::compat::DistributedTrainConfig, train::EarlyStop,
        train::ReduceOnPlateau, train::Trainer, train::Weighting::ByWeight, train::Weighting::PerMicroBatch, train::metrics,
        train::recorder::Profile, train::recorder::RunTimeline, train::search::Halving, train::search::Search,
        train::search::SearchSpace, train::sink::Mlflow, train::sink::TensorBoard, train::sink::Wandb
    }
    #[cfg(all(feature = "arrow", feature = "audio", feature = "image", feature = "parquet", feature = "text"))]
    page! { "data.md":
        use weftgrad::data::*;
        Dataset, Last::Drop, columns::FittedColumns, columns::MissingValues, columns::Scaling, columns::TableColumns, mel::MelSpectrogram, mel::decibels, mix::cutmix, mix::mixup, order::WeightedOrder, sources::Arrow, sources::Csv, sources::JsonLines, sources::NpyRows, sources::Parquet, sources::SafetensorsRows,
        sources::TarShards, sources::TextFolder, sources::Tokenizer, sources::Wav, sources::image::ImageFolder, sources::read_idx, sources::read_npy,
        sources::image::RandAugment, split::class_weights, split::k_fold, split::stratified, split::stratified_k_fold, stream::Replay, stream::Stream, stream::StreamLoader, stream::lines, tokens::IndexedTokens, tokens::TokenFile
    }
    page! { "glossary.md":
        use weftgrad::{distributed::{buckets::BucketOptions, comm::{self, Communicator}, pipeline}, *};
        BackwardHook, BucketOptions, Communicator, adaptive::elastic, adaptive::local_updates, autograd::Backward,
        autograd::Deferred, autograd::Leaf, autograd::Residency, autograd::checkpoint, autograd::recomputed, comm::Fingerprint,
        comm::Membership, comm::Partial, distributed::buckets, distributed::mesh::Mesh, distributed::pipeline,
        distributed::train::Strategy, distributed::zero, nn::parallel::Placed, nn::parallel::SequencePart,
        nn::parallel::TensorGroup, nn::parallel::TensorPlan, numcore::fused, numcore::ops::Op, numcore::ops::Rule,
        numcore::placement::TensorPlacement, numcore::pointwise::Program, pipeline::Checked
    }
    page! { "many-ranks.md":
        use weftgrad::{*, distributed::{buckets::*, zero::*}, nn::{Init, moe::*, parallel::*}, optim::*, prelude::*};
        ContextSlot, GradCompression::Bf16, Init, Mesh, Routing, StatePlace::Host,
        adaptive::powersgd::PowerSgd, ZeroStage::Gradients, ZeroStage::Optimizer, ZeroStage::Parameters
    }
    page! { "uneven-machines.md":
        use weftgrad::{adaptive::elastic::*, distributed::comm::*};
        Elastic, ElasticWorld, Quorum
    }
    page! { "first-training-run.md":
        use weftgrad::{
            adaptive::{balance::*, local_updates::*}, data::*, distributed::{train::*, zero::*}, process,
            train::{*, compat::Policy},
        };
        BalanceOptions, Checkpoints, DiLoCo, Loader, LocalUpdates, Loss, OuterChoice::DiLoCo, Policy::Async,
        Policy::Cadence, Policy::Sync, Shares::BySpeed, Shares::Even, Shares::WhereDevicesDiffer, SpeedShares, Trainer,
        ZeroStage::Parameters, process::Tcp, weftgrad::devices
    }
}

/// The traits of operations that `numcore` declares.
#[test]
fn the_prelude_has_all_operations() {
    let library = text("numcore/src/lib.rs");
    let (_, prelude) = library.split_once("pub mod prelude").unwrap();
    let mut folders = vec![PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../numcore/src")];
    let mut traits = 0;
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            for line in fs::read_to_string(&path).unwrap().lines() {
                let Some((name, _)) =
                    line.trim().strip_prefix("pub trait ").and_then(|line| line.split_once(": Apply {"))
                else {
                    continue;
                };
                assert!(prelude.contains(name), "{name}");
                traits += 1;
            }
        }
    }
    assert!(traits > 20, "{traits}");
}
