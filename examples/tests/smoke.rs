//! Runs each example program with sizes small enough for seconds, and checks that it refuses impossible options. The
//! rules for numbers are tested in the examples' library; this file has one row per program with such a rule.
#![allow(missing_docs)]

use std::{
    path::PathBuf,
    process::{Command, Output},
};

macro_rules! program {
    ($bin:literal) => {
        env!(concat!("CARGO_BIN_EXE_", $bin))
    };
}

const COUNT: &str = "must be a whole number above 0";
const NUMBER: &str = "must be a finite number above 0";

/// Runs a program with its arguments, one word each, in the folder of the workspace.
fn output(program: &str, args: &str) -> Output {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).parent().expect("examples lie in the workspace").to_owned();
    Command::new(program).args(args.split_whitespace()).current_dir(root).output().expect("the program starts")
}

fn runs(program: &str, args: &str) -> String {
    let output = output(program, args);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {args}:\n{said}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn refuses(program: &str, args: &str, says: &str) {
    let output = output(program, args);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains(says), "{program} {args} says no \"{says}\" but:\n{said}");
}

/// An empty folder for a run to write to.
fn folder(name: &str) -> String {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    match std::fs::remove_dir_all(&folder) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => panic!("{}: {e}", folder.display()),
        _ => folder.to_str().expect("a path in UTF-8").into(),
    }
}

#[test]
fn tensors() {
    runs(program!("tensors"), "");
    runs(program!("tensors"), "--help");
    refuses(program!("tensors"), "--batch 3", "unexpected argument '--batch'");
}

#[test]
fn custom_op() {
    runs(program!("custom-op"), "");
}

#[test]
fn devices() {
    assert!(runs(program!("devices"), "").contains("cpu"));
}

#[test]
fn by_hand() {
    let said = runs(program!("by-hand"), "--ranks 3 --steps 30");
    assert!(said.contains("adversarial: loss") && said.contains("progressive: loss"), "{said}");
}

#[test]
fn mlp() {
    runs(program!("mlp"), "");
    refuses(program!("mlp"), "--device abacus", "none of cpu");
}

#[test]
fn mnist() {
    let said = runs(program!("mnist"), "--images 160 --batch 32 --epochs 1");
    assert!(said.contains("% of the test images"), "{said}");
    refuses(program!("mnist"), "--images 0", COUNT);
    refuses(program!("mnist"), "--batch 0", COUNT);
    refuses(program!("mnist"), "--images 100 --batch 1000", "--batch 1000 is more than the 80 images");
    refuses(program!("mnist"), "--lr -1", NUMBER);
    refuses(program!("mnist"), "--threads 0", COUNT);
}

#[test]
fn char_gpt() {
    let gpt = program!("char-gpt");
    let out = folder("char-gpt");
    let tiny = "--layers 1 --width 48 --context 32 --batch 4 --sample 40 --out";
    runs(gpt, &format!("--steps 3 {tiny} {out}"));
    runs(gpt, &format!("--resume --steps 5 --sample 40 --out {out}"));
    // The curve of a resumed run is that of the complete run.
    let steps = std::fs::read_to_string(format!("{out}/metrics.jsonl")).expect("metrics").lines().count();
    assert_eq!(steps, 5, "a record for each step");
    assert!(PathBuf::from(format!("{out}/curves.svg")).is_file());
    // A new run that cannot begin leaves the existing one as it is.
    refuses(gpt, &format!("--steps 3 --layers 1 --width 48 --heads 5 --out {out}"), "5 heads");
    assert!(runs(gpt, &format!("--resume --sample 40 --out {out}")).contains("after 5 steps"));
    // More steps on more ranks; and a new run in the folder of another.
    runs(gpt, &format!("--resume --steps 6 --ranks 2 --sample 40 --out {out}"));
    runs(gpt, &format!("--steps 2 --ranks 3 {tiny} {out}"));
    let steps = std::fs::read_to_string(format!("{out}/metrics.jsonl")).expect("metrics").lines().count();
    assert_eq!(steps, 2, "the lines of the run before are gone");
    refuses(gpt, &format!("--resume --lr 0.1 --out {out}"), "leave those options out");
    runs(gpt, &format!("--seconds 0.5 {tiny} {}", folder("char-gpt-timed")));
    refuses(gpt, &format!("--resume --out {}", folder("char-gpt-none")), "no checkpoint to resume");
    refuses(gpt, "--lr nan", NUMBER);
    refuses(gpt, "--ranks 0", COUNT);
    if !cfg!(feature = "mpi") {
        refuses(gpt, &format!("--engine mpi --steps 1 --out {out}"), "--features mpi");
    }
    refuses(gpt, "--steps 5 --seconds 1", "cannot be used with");
}

/// A signal ends a run in a resumable state, with status 130, and the same command with `--resume` continues it.
#[test]
#[cfg(unix)]
fn char_gpt_interrupted() {
    let out = folder("char-gpt-signal");
    let tiny = "--layers 1 --width 48 --context 32 --batch 4 --sample 40 --steps 1000000 --out";
    let mut command = Command::new(program!("char-gpt"));
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).parent().expect("examples lie in the workspace").to_owned();
    command.args(format!("{tiny} {out}").split_whitespace()).current_dir(root);
    let running = command.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::piped()).spawn();
    let mut running = running.expect("the program starts");
    let metrics = PathBuf::from(format!("{out}/metrics.jsonl"));
    while std::fs::read_to_string(&metrics).map_or(0, |text| text.lines().count()) < 3 {
        assert!(running.try_wait().expect("a child").is_none(), "it ended by itself");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    assert!(Command::new("kill").args(["-INT", &running.id().to_string()]).status().expect("kill").success());
    let ended = running.wait_with_output().expect("a child");
    let said = String::from_utf8_lossy(&ended.stderr);
    assert_eq!(ended.status.code(), Some(130), "{said}");
    let step: u64 =
        said.split("stopped at step ").nth(1).and_then(|rest| rest.split(';').next()?.parse().ok()).expect("a step");
    let said = runs(program!("char-gpt"), &format!("--resume --steps {} --sample 40 --out {out}", step + 2));
    assert!(said.contains(&format!("after {} steps", step + 2)), "{said}");
}

#[test]
fn train_gpt() {
    let gpt = program!("train-gpt");
    let out = folder("train-gpt");
    let config = |name: &str, text: &str| {
        let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
        std::fs::write(&path, text).expect("the folder of tests can be written");
        path.to_str().expect("a path in UTF-8").to_owned()
    };
    let tiny = |steps: u64, ranks: usize, zero: u8| {
        format!(
            "out = {out:?}\nranks = {ranks}\n[model]\nlayers = 1\nwidth = 32\ncontext = 16\n[data]\nbatch = 4\nvalidation = 0.01\n\
             [run]\nsteps = {steps}\nevaluate_every = 4\nsave_every = 2\nzero = {zero}"
        )
    };
    let said = runs(gpt, &format!("--config {}", config("first.toml", &tiny(4, 1, 0))));
    assert!(said.contains("validation loss"), "{said}");
    // On more ranks, sharded, from the end of the run on one rank.
    runs(gpt, &format!("--resume --config {}", config("second.toml", &tiny(6, 2, 3))));
    for together in ["balanced", "local"] {
        let text = format!("{}\ntogether = {together:?}\nevery = 2", tiny(4, 2, 1).replace(&out, &folder(together)));
        let said = runs(gpt, &format!("--config {}", config(&format!("{together}.toml"), &text)));
        assert!(said.contains("validation loss"), "{together}: {said}");
    }
    let metrics = std::fs::read_to_string(format!("{out}/metrics.jsonl")).expect("metrics");
    assert!(metrics.contains("validation/loss") && PathBuf::from(format!("{out}/report.html")).is_file(), "{metrics}");
    assert!(runs(gpt, "--show").contains("[optimizer]"));
    refuses(
        gpt,
        &format!("--config {}", config("typo.toml", "[optimizer]\nrl = 1")),
        "the nearest key there is is `optimizer.lr`",
    );
    let mesh = |name: &str, text: &str| format!("--config {}", config(name, &format!("ranks = 3\n[mesh]\n{text}")));
    refuses(gpt, &mesh("uneven.toml", "tensor = 2"), "the world has 3");
    refuses(gpt, &mesh("schedule.toml", "pipeline = 3\nschedule = \"ZBV\""), "ZBV needs");
    refuses(gpt, &format!("--config {}", config("zero.toml", "[run]\nzero = 4")), "`run.zero` is a stage from 0 to 3");
}

/// Every axis, and several, take the steps of one rank.
#[test]
fn train_gpt_on_a_mesh() {
    let losses = |name: &str, ranks: usize, model: &str, mesh: &str, run: &str| -> Vec<f64> {
        let out = folder(&format!("train-gpt-{name}"));
        let text = format!(
            "out = {out:?}\nranks = {ranks}\n[model]\nlayers = 2\nwidth = 32\ncontext = 16\n{model}\n[mesh]\n{mesh}\n\
             [data]\nbatch = 8\nvalidation = 0.01\n[run]\nsteps = 20\nevaluate_every = 20\nsave_every = 15\n{run}"
        );
        let config = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("mesh-{name}.toml"));
        std::fs::write(&config, text).expect("the folder of tests can be written");
        runs(program!("train-gpt"), &format!("--config {}", config.display()));
        let metrics = std::fs::read_to_string(format!("{out}/metrics.jsonl")).expect("metrics");
        let records = metrics.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).expect("a record"));
        let records: Vec<_> = records.filter(|record| record["values"]["loss"].is_f64()).collect();
        // The last step again, from the checkpoint before it.
        let (variable, replay) = weftgrad::train::StepReplay::of(format!("{out}/checkpoints"), 20).variable();
        let mut command = Command::new(program!("train-gpt"));
        command.args(["--engine", "processes", "--resume", "--config"]).arg(&config).env(variable, replay);
        let output = command.output().expect("the program can be started");
        let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        assert!(output.status.success(), "{name}: {said}");
        assert!(said.contains(&format!("step 20 on {ranks} ranks, from the checkpoint of step 15")), "{name}: {said}");
        let of = |record: &serde_json::Value, value: &str| record["values"][value].as_f64().expect("a number");
        let last = records.last().expect("a record");
        let shown = format!(" calls, loss {}, gradient norm {}\n", of(last, "loss"), of(last, "grad_norm"));
        // Ranks that train by themselves have losses of their own.
        let equal = if name == "local" { 2 } else { ranks };
        assert_eq!(said.matches(&shown).count(), equal, "{name}: {shown}, {said}");
        records.iter().map(|record| of(record, "loss")).collect()
    };
    let same = |many: Vec<f64>, one: &[f64], name: &str| {
        let close = |(a, b): (&f64, &f64)| (a - b).abs() < 1e-4 * b;
        assert!(many.len() == 2 && many.iter().zip(one).all(close), "{name}: {many:?}, one rank: {one:?}");
    };
    let dense = losses("dense", 1, "", "", "");
    assert!(dense[1] < dense[0], "{dense:?}");
    for (name, ranks, mesh, run) in [
        ("data", 3, "", ""),
        ("micros", 1, "", "accumulation = 4"),
        ("tensor", 2, "tensor = 2", ""),
        ("context", 2, "context = 2", ""),
        ("pipeline", 2, "pipeline = 2", "accumulation = 4"),
        ("zbv", 2, "pipeline = 2\nschedule = \"ZBV\"\nstages_per_rank = 2", "accumulation = 4"),
        ("several", 4, "pipeline = 2\ntensor = 2\nsequence = true", "accumulation = 2"),
        ("replicas", 4, "pipeline = 2", "accumulation = 2\nzero = 1"),
    ] {
        same(losses(name, ranks, "", mesh, run), &dense, name);
    }
    let mixture = losses("mixture", 1, "experts = 4", "", "");
    same(losses("experts", 2, "experts = 4", "experts = 2", ""), &mixture, "experts");
    let local = losses("local", 4, "", "pipeline = 2", "accumulation = 2\ntogether = \"local\"\nevery = 5");
    assert!(local[1] < local[0], "{local:?}");
}

/// The recipes, of smaller models and shorter runs, take the steps of one rank, or of two where these train alone.
#[test]
fn recipes_of_train_gpt() {
    let recipes = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("recipes");
    let losses = |name: &str, recipe: &toml::Table| -> Vec<f64> {
        let (mut recipe, out) = (recipe.clone(), folder(&format!("recipe-{name}")));
        recipe.insert("out".into(), out.clone().into());
        let mut set = |table: &str, all: &[(&str, toml::Value)]| {
            let table = recipe.entry(table).or_insert_with(|| toml::Table::new().into());
            table
                .as_table_mut()
                .expect("a table")
                .extend(all.iter().map(|(key, value)| ((*key).into(), value.clone())));
        };
        set("model", &[("layers", 2.into()), ("width", 32.into()), ("context", 16.into())]);
        set("data", &[("batch", 16.into()), ("validation", 0.01.into())]);
        set(
            "run",
            &[("steps", 20.into()), ("evaluate_every", 20.into()), ("save_every", 20.into()), ("every", 5.into())],
        );
        let config = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("recipe-{name}.toml"));
        std::fs::write(&config, recipe.to_string()).expect("the folder of tests can be written");
        runs(program!("train-gpt"), &format!("--config {}", config.display()));
        let metrics = std::fs::read_to_string(format!("{out}/metrics.jsonl")).expect("metrics");
        let records = metrics.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).expect("a record"));
        records.filter_map(|record| record["values"]["loss"].as_f64()).collect()
    };
    let mut seen = 0;
    for entry in std::fs::read_dir(recipes).expect("recipes") {
        let path = entry.expect("an entry").path();
        let name = path.file_stem().and_then(|name| name.to_str()).expect("a name").to_owned();
        let recipe: toml::Table = std::fs::read_to_string(&path).expect("a file").parse().expect("TOML");
        assert!(recipe["out"].as_str().is_some_and(|out| out.ends_with(&name)), "{name}");
        let is_local = recipe.get("run").is_some_and(|run| run.get("together").is_some());
        let mut alone = recipe.clone();
        alone.insert("ranks".into(), if is_local { 2 } else { 1 }.into());
        alone.remove("mesh");
        if let Some(run) = alone.get_mut("run").and_then(toml::Value::as_table_mut) {
            run.remove("zero");
            // Replicas then have the examples that they have in pipelines.
            run.remove("accumulation");
        }
        let (many, one) = (losses(&name, &recipe), losses(&format!("{name}-alone"), &alone));
        let close = |(a, b): (&f64, &f64)| (a - b).abs() < 1e-4 * b;
        assert!(many.len() == one.len() && !many.is_empty(), "{name}: {many:?}, one rank: {one:?}");
        assert!(many.iter().zip(&one).all(close), "{name}: {many:?}, one rank: {one:?}");
        seen += 1;
    }
    assert_eq!(seen, 8);
}

#[test]
fn ddp() {
    runs(program!("ddp"), "--ranks 3 --steps 4");
    // A world of one is a `NoOpCommunicator`.
    runs(program!("ddp"), "--ranks 1 --steps 4");
    // More ranks than examples of a batch, on devices that they take in turn.
    runs(program!("ddp"), "--ranks 3 --steps 2 --batch 2 --device cpu,cpu --threads 1");
    refuses(program!("ddp"), "--device cpu,abacus", "none of cpu");
    refuses(program!("ddp"), "--ranks 0", COUNT);
}

/// A program that is its own launcher.
#[test]
fn processes() {
    runs(program!("ddp"), "--engine processes --ranks 2 --steps 4");
}

#[test]
fn tensor_parallel() {
    runs(program!("tensor-parallel"), "--ranks 2 --width 32 --layers 2");
    let refused = "8 rows or heads cannot be shared out among 3 ranks";
    refuses(program!("tensor-parallel"), "--ranks 3 --width 24 --layers 1", refused);
}

#[test]
fn experts() {
    runs(program!("experts"), "--ranks 2 --width 16 --layers 2 --experts 4");
    runs(program!("experts"), "--ranks 1 --width 16 --layers 1 --experts 3");
    let refused = "4 experts cannot be shared out among 3 ranks";
    refuses(program!("experts"), "--ranks 3 --width 16 --layers 1 --experts 4", refused);
}

#[test]
fn long_context() {
    for ranks in [1, 2, 4] {
        runs(program!("long-context"), &format!("--ranks {ranks} --width 32 --layers 2 --tokens 64"));
    }
    let refused =
        "sequences of 64 tokens cannot be shared out among 3 ranks, which have two chunks each: pad them to 66";
    refuses(program!("long-context"), "--ranks 3 --width 24 --layers 1 --tokens 64", refused);
}

#[test]
fn heterogeneous() {
    let small = "--steps 4 --every 2 --batch 2 --context 16 --layers 1 --width 16";
    runs(program!("heterogeneous"), &format!("--ranks 2 {small}"));
    runs(program!("heterogeneous"), &format!("--ranks 1 {small}"));
    refuses(program!("heterogeneous"), "--slow 0", "above 0");
}

#[test]
fn zero() {
    runs(program!("zero"), "--ranks 2 --width 32 --layers 2");
    runs(program!("zero"), "--ranks 1 --width 32 --layers 2");
    refuses(program!("zero"), "--width 0", COUNT);
    refuses(program!("zero"), "--width 30", "4 heads do not divide a width of 30");
}

#[test]
fn reshard() {
    runs(program!("reshard"), &format!("--out {}", folder("reshard")));
    refuses(program!("reshard"), "--from 0", COUNT);
}

#[test]
fn pipeline() {
    let args = "--ranks 3 --schedule ZB-H1 --micro-batches 6 --steps 2 --out";
    runs(program!("pipeline"), &format!("{args} {}", folder("pipeline")));
    runs(program!("pipeline"), &format!("--ranks 1 --steps 1 --out {}", folder("pipeline-1")));
    refuses(program!("pipeline"), "--micro-batches 0", COUNT);
}

/// A folder with a random Llama, a tokenizer and a chat template, from the test data of the crate `models`.
#[cfg(feature = "text")]
fn chat_model(name: &str) -> String {
    let folder = folder(name);
    let references = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../models/references");
    std::fs::create_dir_all(&folder).expect("a folder");
    for file in ["chat/tokenizer.json", "chat/tokenizer_config.json"] {
        let file = references.join(file);
        std::fs::copy(&file, PathBuf::from(&folder).join(file.file_name().expect("a name"))).expect("copied");
    }
    let fields = weftgrad::models::ConfigFields::open(&references.join("llama")).expect("fields");
    let mut config = weftgrad::models::DecoderConfig::read(&fields).expect("understood");
    config.vocab = 340;
    let init = weftgrad::nn::Init::new(&weftgrad::Cpu::new(), 0);
    let model = weftgrad::models::Decoder::new(&init, config).expect("a model");
    weftgrad::models::Pretrained::save_pretrained(&model, &folder).expect("saved");
    folder
}

#[test]
#[cfg(feature = "text")]
fn finetune_and_generate() {
    let model = chat_model("chat-model");
    let (data, out) = (format!("{model}/chat.jsonl"), format!("{model}/adapter"));
    let row = r#"{"messages": [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "a"}]}"#;
    std::fs::write(&data, format!("{row}\n\n{row}\n")).expect("written");
    let said =
        runs(program!("finetune"), &format!("{model} --data {data} --out {out} --steps 30 --context 80 --lr 1e-2"));
    let losses: Vec<f64> = said.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    // The model is random and its head frozen: there is not much that adapters can learn.
    assert!(losses[2] < losses[1] - 0.1, "{said}");
    runs(program!("generate"), &format!("{model} a --tokens 3"));
    runs(program!("generate"), &format!("{model} a --tokens 3 --chat --adapter {out} --temperature 0.7 --stop x"));
    refuses(program!("generate"), "no-such-folder a", "no-such-folder");
    std::fs::write(&data, "{}").expect("written");
    refuses(program!("finetune"), &format!("{model} --data {data} --out {out}"), "line 1: a conversation");
}
