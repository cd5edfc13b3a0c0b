//! Every reader of files gets files with random changes. Each must return a value or an error, never panic. It must
//! allocate no more than a multiple of the file's length, whatever sizes the file claims.
//!
//! `WEFTGRAD_TEST_MUTATIONS` is the number of changed files for each reader.
#![allow(missing_docs)]

mod mutate;

use std::{
    env, fs,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    sync::Arc,
};

use mutate::{Draws, mutate};
use peak_alloc::PeakAlloc;
use serde::{Deserialize, Serialize};
use weftgrad::{
    data::{
        Dataset,
        gguf::GgufFile,
        sources::{Csv, JsonLines, SafetensorsRows, TarShards, TextLines, read_idx, read_npy, read_npz},
        tokens::{IndexedTokens, IndexedTokensWriter, TokenFile, TokenType, write_tokens},
    },
    distributed::{
        checkpoint::{CheckpointReader, Folder},
        comm::{Comm, NoOpCommunicator},
        pipeline::{Action, Limits, Lowering, PipeShape, Schedule, ScheduleKind},
        train::TrainStep,
    },
    import::OnnxModel,
    models::{ConfigFields, Decoder, DecoderConfig, JsonObject, Pretrained},
    nn::Init,
    prelude::*,
    safetensors,
    train::sink::read_jsonl,
};

#[global_allocator]
static ALLOCATED: PeakAlloc = PeakAlloc;

/// The bytes that a reader may allocate: `BASE` and `TIMES` the length of the file.
const BASE: usize = 1 << 20;
const TIMES: usize = 256;

type Outcome = std::result::Result<(), String>;

/// A reader of one file format, with a valid file.
struct Reader {
    name: &'static str,
    file: PathBuf,
    bytes: Vec<u8>,
    read: Box<dyn Fn() -> Outcome>,
    /// Repairs a changed file, such as its checksum, so that the reader gets past it.
    mended: fn(Vec<u8>) -> Vec<u8>,
}

/// A reader of an existing file; `read` must read it without an error.
fn reader<T>(name: &'static str, file: &Path, read: impl Fn(&Path) -> Result<T> + 'static) -> Reader {
    let (bytes, path) = (fs::read(file).unwrap(), file.to_path_buf());
    let read = move || read(&path).map(|_| ()).map_err(|error| error.to_string());
    Reader { name, file: file.into(), bytes, read: Box::new(read), mended: |bytes| bytes }
}

fn every<D: Dataset>(examples: &D) -> Result<()> {
    (0..examples.len()).try_for_each(|index| examples.get(index).map(|_| ()))
}

fn text(folder: &Path, name: &str, text: &str) -> PathBuf {
    let path = folder.join(name);
    fs::write(&path, text).unwrap();
    path
}

fn sources(folder: &Path) -> Result<Vec<Reader>> {
    let idx = folder.join("labels.idx");
    fs::write(&idx, [&[0u8, 0, 8, 2, 0, 0, 0, 3, 0, 0, 0, 4][..], &[7; 12]].concat()).unwrap();
    let csv = text(folder, "a.csv", "name,x,y\nplain,1,2.5\n\"with, comma\",-3,4\n\"two\nlines\",5,6\n");
    let lines =
        text(folder, "a.jsonl", "{\"text\": \"one\", \"n\": 1}\n\n{\"text\": [1, {\"a\": null}]}\n{\"text\": 3}\n");
    let words = text(folder, "a.txt", "one line\nanother\r\n\nß last");
    let tensors = folder.join("rows.safetensors");
    let cpu = Cpu::with_threads(1);
    let rows = |dtype| Tensor::ones(&cpu, [4, 3], dtype);
    let named = [("x".to_string(), rows(DType::F32)?), ("y".to_string(), rows(DType::I64)?)];
    safetensors::save(&tensors, &named, &Default::default())?;
    let shard = folder.join("1.tar");
    fs::write(&shard, tar(&[("a/7.jpg", b"picture"), ("a/7.cls", b"3"), ("b.txt", b"text")])).unwrap();
    let npy = folder.join("a.npy");
    let header = "{'descr': '>f4', 'fortran_order': True, 'shape': (2, 3), }";
    fs::write(&npy, [b"\x93NUMPY\x01\x00\x3a\x00", header.as_bytes(), &[7; 24]].concat()).unwrap();
    let npz = Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/tests/references/packed.npz");
    let packed = folder.join("packed.npz");
    fs::copy(npz, &packed).unwrap();
    let host = Cpu::with_threads(1);
    Ok(vec![
        reader("IDX", &idx, |path| read_idx(path)),
        reader("npy", &npy, |path| read_npy(path)),
        reader("npz", &packed, |path| read_npz(path)),
        reader("CSV", &csv, |path| every(&Csv::open(path)?)),
        reader("JSON lines", &lines, |path| every(&JsonLines::open(path)?)),
        reader("lines of text", &words, |path| every(&TextLines::open(path)?)),
        reader("rows of safetensors", &tensors, |path| every(&SafetensorsRows::open(path)?)),
        reader("safetensors", &tensors, move |path| safetensors::load(path, &host)),
        reader("tar", &shard, |path| every(&TarShards::open([path])?)),
    ])
}

fn tar(files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for (name, bytes) in files {
        let mut header = tar::Header::new_gnu();
        header.set_size(bytes.len() as u64);
        header.set_mode(0o644);
        builder.append_data(&mut header, name, *bytes).unwrap();
    }
    builder.into_inner().unwrap()
}

fn tokens(folder: &Path) -> Result<Vec<Reader>> {
    let plain = folder.join("tokens.bin");
    write_tokens(&plain, TokenType::U16, &[1, 2, 3, 4, 500])?;
    let prefix = folder.join("corpus");
    let mut writer = IndexedTokensWriter::create(&prefix, TokenType::U16)?;
    writer.document(&[1, 2, 3])?;
    writer.document(&[4])?;
    writer.finish()?;
    let read = move |index: &Path| {
        let tokens = IndexedTokens::open(index.with_extension(""))?;
        (0..tokens.sequences()).try_for_each(|sequence| tokens.sequence(sequence).map(|_| ()))
    };
    Ok(vec![
        reader("tokens", &plain, |path| TokenFile::open(path, TokenType::U16)?.in_memory()),
        reader("index of tokens", &prefix.with_extension("idx"), read),
        reader("indexed tokens", &prefix.with_extension("bin"), move |path| read(&path.with_extension("idx"))),
    ])
}

fn models(folder: &Path) -> Vec<Reader> {
    let llama = r#"{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 32,
        "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 128, "rms_norm_eps": 1e-05, "hidden_act": "silu", "rope_theta": 10000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "tie_word_embeddings": false}"#;
    let config = text(folder, "config.json", llama);
    let index = text(
        folder,
        "model.safetensors.index.json",
        r#"{"metadata": {"total_size": 96}, "weight_map": {"a": "rows.safetensors", "b": "rows.safetensors"}}"#,
    );
    let parent = |path: &Path| path.parent().map(Path::to_path_buf).unwrap_or_default();
    let references = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/references");
    let copied = |from: &str, to: &str| {
        let to = folder.join(to);
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        fs::copy(references.join(from), &to).unwrap();
        to
    };
    let (types, gguf) = (copied("gguf/types.gguf", "types.gguf"), copied("gguf/llama-f16.gguf", "llama.gguf"));
    copied("gpt2/config.json", "gpt2/config.json");
    let pickled = copied("pickle/gpt2.bin", "gpt2/pytorch_model.bin");
    let onnx = folder.join("cnn.onnx");
    fs::copy(Path::new(env!("CARGO_MANIFEST_DIR")).join("../models-import/references/cnn.onnx"), &onnx).unwrap();
    let load = |path: &Path| Decoder::from_pretrained(path, &Init::new(&Cpu::with_threads(1), 0));
    vec![
        reader("tensors of GGUF", &types, |path| {
            let file = GgufFile::open(path)?;
            file.names().try_for_each(|name| {
                let (kind, shape) = file.tensor(name)?;
                file.read(name, 0, &mut vec![0; shape.numel() * kind.dtype().size()])
            })
        }),
        reader("a model in GGUF", &gguf, load),
        reader("a model in ONNX", &onnx, |path| OnnxModel::load(path, &Cpu::with_threads(1))),
        reader("a pickled model", &pickled, move |path| load(&parent(path))),
        reader("config.json", &config, move |path| DecoderConfig::read(&ConfigFields::open(&parent(path))?)),
        reader("an index file", &index, JsonObject::open),
    ]
}

fn schedules(folder: &Path) -> Result<Vec<Reader>> {
    let shape = PipeShape { ranks: 2, stages_per_rank: 2, micro_batches: 4 };
    let schedule = ScheduleKind::Interleaved.generate(shape)?;
    let lowered = schedule.lower(Lowering::default())?;
    let read = |path: &Path| fs::read_to_string(path).map_err(|error| weftgrad::Error::io(path, error));
    let actions = lowered.actions().map(|(_, _, action)| action.to_string()).collect::<Vec<_>>().join("\n");
    Ok(vec![
        reader("schedule of passes", &text(folder, "passes.csv", &schedule.to_csv()), move |path| {
            Schedule::from_csv(&read(path)?)?.lower(Lowering::default())?.check(Limits::default())
        }),
        reader("lowered schedule", &text(folder, "lowered.csv", &lowered.to_csv()), move |path| {
            Schedule::from_csv(&read(path)?)?.check(Limits::default())
        }),
        reader("actions", &text(folder, "actions.txt", &actions), move |path| {
            read(path)?.lines().try_for_each(|line| line.parse::<Action>().map(|_| ()))
        }),
    ])
}

fn checkpoints(folder: &Path) -> Result<Vec<Reader>> {
    let cpu = Cpu::with_threads(1);
    let comm: Comm<Cpu> = Arc::new(NoOpCommunicator::new(&cpu));
    let model = nn::Linear::new(&nn::Init::new(&cpu, 0), 3, 2)?;
    let step = TrainStep::builder(&comm, &model).optimizer(weftgrad::optim::AdamWConfig::default()).build()?;
    let saved = Folder::new(folder.join("checkpoints"));
    step.save(&saved, &Default::default())?;
    let manifest = saved.step(0).join("manifest.json");
    let all = move |path: &Path| {
        let mut reader = CheckpointReader::open(path.parent().unwrap_or(path))?;
        let names: Vec<String> = reader.manifest().names().map(String::from).collect();
        names.iter().try_for_each(|name| reader.tensor(&cpu, name).map(|_| ()))
    };
    let tensors = fs::read_dir(saved.step(0)).unwrap().map(|entry| entry.unwrap().path());
    let tensors = tensors.into_iter().find(|path| path.extension().is_some_and(|e| e == "safetensors")).unwrap();
    let of_tensors = all.clone();
    Ok(vec![
        reader("manifest", &manifest, all.clone()),
        Reader { mended: checksummed, ..reader("manifest with its checksum", &manifest, all) },
        reader("tensors of a checkpoint", &tensors, move |path| of_tensors(path)),
    ])
}

/// A manifest with its checksum updated to its contents.
fn checksummed(bytes: Vec<u8>) -> Vec<u8> {
    let Ok(serde_json::Value::Object(mut all)) = serde_json::from_slice(&bytes) else { return bytes };
    all.remove("checksum");
    let sum = crc32fast::hash(serde_json::Value::Object(all.clone()).to_string().as_bytes());
    all.insert("checksum".into(), sum.into());
    serde_json::Value::Object(all).to_string().into_bytes()
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Configuration {
    steps: u64,
    rate: f64,
    name: String,
    sizes: Vec<usize>,
}

fn runs(folder: &Path) -> Vec<Reader> {
    let record = r#"{"step":1,"epoch":0,"time":1.5,"values":{"loss":2.5,"rate":"NaN"}}"#;
    let config = text(folder, "config.toml", "steps = 10\nrate = 1e-3\nname = \"a\"\nsizes = [1, 2]\n");
    vec![
        reader("a run's record", &text(folder, "run.jsonl", &format!("{record}\n{record}\n")), |path| read_jsonl(path)),
        reader("TOML", &config, |path| {
            weftgrad_examples::config::read::<Configuration>(path)
                .map_err(|why| weftgrad::Error::format("TOML", why.to_string()))
        }),
    ]
}

/// Tests a reader with `count` changed files.
fn try_on(reader: &Reader, count: u64) {
    assert_eq!((reader.read)(), Ok(()), "{}: the file as it was", reader.name);
    let (mut refused, most) = (0, BASE + TIMES * reader.bytes.len());
    for seed in 0..count {
        let changed = (reader.mended)(mutate(&reader.bytes, &mut Draws::new(seed)));
        // A new file: some file systems write one that is truncated and refilled to the disk at once.
        fs::remove_file(&reader.file).unwrap();
        fs::write(&reader.file, &changed).unwrap();
        let before = ALLOCATED.current_usage();
        ALLOCATED.reset_peak_usage();
        let ended = catch_unwind(AssertUnwindSafe(|| (reader.read)()));
        let allocated = ALLOCATED.peak_usage().saturating_sub(before);
        let what = || format!("{}, seed {seed}: {:?}", reader.name, String::from_utf8_lossy(&changed));
        let Ok(ended) = ended else { panic!("panicked on {}", what()) };
        assert!(allocated <= most, "allocated {allocated} bytes, and {most} are the most, for {}", what());
        refused += u64::from(ended.is_err());
    }
    fs::write(&reader.file, &reader.bytes).unwrap();
    assert!(refused > 0, "{}: nothing was refused", reader.name);
}

/// One test for all: allocations of a concurrent one would be counted.
#[test]
fn changed_files_end_in_values_or_errors() -> Result<()> {
    let count = env::var("WEFTGRAD_TEST_MUTATIONS").ok().and_then(|count| count.parse().ok()).unwrap_or(10_000);
    let folder = env::temp_dir().join(format!("weftgrad-malformed-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let mut readers = sources(&folder)?;
    readers.extend(tokens(&folder)?);
    readers.extend(models(&folder));
    readers.extend(schedules(&folder)?);
    readers.extend(checkpoints(&folder)?);
    readers.extend(runs(&folder));
    readers.iter().for_each(|reader| try_on(reader, count));
    fs::remove_dir_all(&folder).unwrap();
    Ok(())
}
