//! Rule: names that people bring from other frameworks are found in the documentation's search, as items or as aliases of items.

use super::Finding;
use super::tree::Tree;

/// Names of gradient synchronisation, pipelines, ZeRO, trainers and uneven machines in other frameworks.
#[rustfmt::skip]
const NAMES: &[&str] = &[
    "BucketedTrainer", "backward_and_step", "broadcast_params", "communicator", "num_buckets", "mark_grad_ready", "wait_and_unflatten",
    "Schedule1F1B", "PipelineOutput", "input_grads", "param_grads", "TrainablePipelineStage", "PipelineAction", "LossFn",
    "ZeroStage3", "gather_full_params", "release_params", "param_owners", "owned_param_ids", "timestep", "set_lr",
    "DistributedCudaTrainer", "DistributedComm", "create_local_comm_pair", "train_batch", "local_loss", "apply_ddp_gradients", "dist_config",
    "reached_max_steps", "is_coordinator", "shard_batches", "DistributedTrainConfig",
    "Ddp", "ElChe", "DdpConfig", "ApplyPolicy", "HasGraph", "HeadReplica", "setup", "setup_with", "sync_params", "sync_buffers",
    "all_reduce_gradients", "weighted_all_reduce_gradients", "is_heterogeneous", "chunk_ratios", "compute_shard_sizes", "speed_hint",
    "overhead_target", "max_anchor", "max_grad_norm", "timeline", "world_size",
    "DistributedDataParallel", "FullyShardedDataParallel", "DataLoader", "DistributedSampler", "DeviceMesh", "GradScaler", "clip_grad_norm",
    "DDP", "FSDP", "HSDP", "ZeRO", "SimpleTrainer", "ZeroStage1", "ZeroStage2", "lr_scheduler", "autocast", "no_grad", "device_mesh",
    "SyncBatchNorm", "convert_sync_batchnorm", "join", "barrier", "all_gather", "reduce_scatter", "torchrun", "Trainer",
    "EarlyStopping", "ModelCheckpoint", "save_pretrained", "from_pretrained", "PeftModel", "modules_to_save", "DiLoCo", "PowerSGD",
    "no_sync", "register_comm_hook", "register_hook", "state_dict", "load_state_dict", "param_groups", "zero_grad", "parallelize_module",
];

/// What comes before the name of an item.
const ITEMS: &[&str] = &["fn ", "struct ", "enum ", "trait ", "type ", "const ", "mod "];

pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    missing(tree, NAMES)
}

fn missing(tree: &Tree, names: &[&str]) -> Vec<Finding> {
    let sources: Vec<&str> =
        tree.texts(".rs").filter(|(path, _)| path.contains("/src/")).map(|(_, text)| text).collect();
    let gone = names.iter().filter(|name| !sources.iter().any(|text| names_item(text, name)));
    gone.map(|name| {
        let why = format!("`{name}` is found by nobody: give the item that it is here `#[doc(alias(\"{name}\"))]`");
        Finding::new("xtask/src/tidy/aliases.rs", 1, why)
    })
    .collect()
}

/// Whether a source has a public item or a method of a public trait of this name, a public field of it, or an alias, as
/// rustdoc's search compares names.
fn names_item(text: &str, name: &str) -> bool {
    let (name, mut in_trait) = (searched(name), false);
    text.lines().any(|line| {
        in_trait = line.starts_with("pub trait ") || in_trait && line != "}";
        let line = line.trim();
        if let Some(aliases) = line.strip_prefix("#[doc(alias") {
            return aliases.split('"').any(|alias| searched(alias) == name);
        }
        let method = line.strip_prefix("fn ").filter(|_| in_trait);
        let Some(item) = line.strip_prefix("pub ").or(method) else { return false };
        let item = ITEMS.iter().find_map(|kind| item.strip_prefix(kind)).unwrap_or(item);
        item.split(['(', '<', ':', ' ', ';']).next().is_some_and(|item| searched(item) == name)
    })
}

/// A name without case and underscores.
fn searched(name: &str) -> String {
    name.replace('_', "").to_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_fields_and_aliases_are_found() {
        let text = "#[doc(alias(\"ElChe\"))]\npub struct Balanced<R> {\n    pub hint: f64,\n}\npub trait T {\n    fn setup<R>(&self);\n}\npub(crate) fn hidden() {}\n    fn private() {}\n";
        let tree = Tree::of(&[("a/src/lib.rs", text), ("a/tests/b.rs", "pub fn tested() {}")]);
        assert!(missing(&tree, &["ElChe", "el_che", "Balanced", "hint", "setup"]).is_empty());
        assert_eq!(missing(&tree, &["hidden", "private", "tested", "Bal", "El"]).len(), 5);
    }
}
