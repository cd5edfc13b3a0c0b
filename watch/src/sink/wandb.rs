//! [`Wandb`]: a run in the files of Weights & Biases' offline mode.
//!
//! The file is a log of LevelDB's form, in blocks of 32 KiB. Each record, or each part of one, has a checksum, a
//! length, and its place in the record. A record is a protocol buffer of W&B's `wandb_internal.proto`.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::Write,
    path::{Path, PathBuf},
    thread,
    time::{SystemTime, UNIX_EPOCH},
};

use crc32fast::Hasher;
use data::{calendar::civil_date, protobuf::ProtoMessage};
use numcore::{Error, Result, Within};
use serde_json::Value as Json;

use super::{Histogram, Record, Sink, Value, random};
use crate::json::{list, number, object, quoted};

/// Writes a run as Weights & Biases does without a network: `wandb sync FOLDER` uploads it. Numbers, texts and
/// histograms are written; pictures are left out.
///
/// The run ends when the sink is dropped, as failed if that happens in a panic.
///
/// ```no_run
/// use watch::sink::{Record, Sink, Wandb};
/// # fn main() -> numcore::Result<()> {
/// let mut sink = Wandb::in_folder("wandb", "language models")?.name("first").configuration([("lr", "3e-4")]);
/// sink.write(&Record::new(1, 0).scalar("loss", 2.5))?;
/// # Ok(())
/// # }
/// ```
#[doc(alias("WandbLogger", "weights and biases"))]
#[derive(Debug)]
pub struct Wandb {
    file: File,
    path: PathBuf,
    id: String,
    project: String,
    name: Option<String>,
    configuration: Vec<(String, String)>,
    begun: SystemTime,
    /// The bytes of the file, and the number of records.
    length: usize,
    records: i64,
    /// The last value of each name.
    last: BTreeMap<String, String>,
}

/// The first bytes of a file: a name, a number and the version.
const HEADER: [u8; 7] = *b":W&B\xe1\xbe\0";
const BLOCK: usize = 1 << 15;
/// The bytes before each part of a record.
const PART: usize = 7;
/// The oldest program of W&B that reads these records.
const MIN_CONSUMER: &str = "0.70.0";

/// The numbers of kinds of records.
const HISTORY: u32 = 2;
const SUMMARY: u32 = 3;
const RUN: u32 = 17;
const EXIT: u32 = 18;
const VERSION: u32 = 21;

impl Wandb {
    /// Begins a run of a project, in a folder of its own in `folder`.
    ///
    /// # Errors
    /// An error if the folder or the file cannot be made.
    #[track_caller]
    pub fn in_folder(folder: impl AsRef<Path>, project: &str) -> Result<Self> {
        Self::begin(folder.as_ref(), project).at_caller()
    }

    fn begin(folder: &Path, project: &str) -> Result<Self> {
        let (begun, id) = (SystemTime::now(), format!("{:08x}", random()? as u32));
        let folder = folder.join(format!("offline-run-{}-{id}", date(seconds(begun) as u64)));
        fs::create_dir_all(folder.join("files")).map_err(|e| Error::io(&folder, e))?;
        let path = folder.join(format!("run-{id}.wandb"));
        let mut file = File::create_new(&path).map_err(|e| Error::io(&path, e))?;
        file.write_all(&HEADER).map_err(|e| Error::io(&path, e))?;
        let (length, project) = (HEADER.len(), project.into());
        let (name, configuration, last) = (None, Vec::new(), BTreeMap::new());
        Ok(Wandb { file, path, id, project, name, configuration, begun, length, records: 0, last })
    }

    /// Sets the name that is shown.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// Adds options of the run; those that are numbers, `true` or `false` are written as such.
    pub fn configuration<K: Into<String>, V: Into<String>>(
        mut self,
        options: impl IntoIterator<Item = (K, V)>,
    ) -> Self {
        self.configuration.extend(options.into_iter().map(|(name, value)| (name.into(), value.into())));
        self
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes the run itself, before its first record.
    fn introduce(&mut self) -> Result<()> {
        let version = ProtoMessage::new().bytes(1, concat!("weftgrad ", env!("CARGO_PKG_VERSION")));
        self.put(VERSION, ProtoMessage::new().message(1, version.bytes(2, MIN_CONSUMER)))?;
        let option = |all: ProtoMessage, (name, value): &(String, String)| {
            let is_literal = matches!(serde_json::from_str(value), Ok(Json::Number(_) | Json::Bool(_)));
            let value = if is_literal { value.clone() } else { quoted(value) };
            all.message(1, ProtoMessage::new().bytes(1, name).bytes(16, value))
        };
        let configuration = self.configuration.iter().fold(ProtoMessage::new(), option);
        let begun = self.begun.duration_since(UNIX_EPOCH).unwrap_or_default();
        let begun = ProtoMessage::new().int(1, begun.as_secs() as i64).int(2, begun.subsec_nanos().into());
        let run = ProtoMessage::new().bytes(1, &self.id).bytes(3, &self.project).message(4, configuration);
        let run = self.name.iter().fold(run, |run, name| run.bytes(8, name));
        self.put(RUN, run.message(17, begun))
    }

    /// Writes a record of a kind.
    fn put(&mut self, kind: u32, content: ProtoMessage) -> Result<()> {
        self.records += 1;
        let record = ProtoMessage::new().int(1, self.records).message(kind, content).into_bytes();
        let mut bytes = Vec::new();
        let (mut rest, mut is_first) = (&record[..], true);
        loop {
            let left = BLOCK - (self.length + bytes.len()) % BLOCK;
            if left < PART {
                bytes.resize(bytes.len() + left, 0);
                continue;
            }
            let part;
            (part, rest) = rest.split_at(rest.len().min(left - PART));
            // Whole, or the first, a middle, or the last part.
            let place = match (is_first, rest.is_empty()) {
                (true, true) => 1,
                (true, false) => 2,
                (false, false) => 3,
                (false, true) => 4,
            };
            let mut sum = Hasher::new();
            sum.update(&[place]);
            sum.update(part);
            bytes.extend(sum.finalize().to_le_bytes());
            bytes.extend((part.len() as u16).to_le_bytes());
            bytes.push(place);
            bytes.extend(part);
            is_first = false;
            if rest.is_empty() {
                break;
            }
        }
        self.length += bytes.len();
        self.file.write_all(&bytes).map_err(|e| Error::io(&self.path, e))
    }

    fn summarize(&mut self) -> Result<()> {
        let values = items(1, &self.last);
        self.put(SUMMARY, values)
    }
}

impl Sink for Wandb {
    fn write(&mut self, record: &Record) -> Result<()> {
        if self.records == 0 {
            self.introduce()?;
        }
        let mut values: BTreeMap<String, String> =
            record.values.iter().filter_map(|(name, value)| Some((name.clone(), json(value)?))).collect();
        values.insert("_step".into(), record.step.to_string());
        values.insert("_timestamp".into(), literal(record.seconds()));
        values.insert("_runtime".into(), literal(record.seconds() - seconds(self.begun)));
        let step = ProtoMessage::new().int(1, record.step as i64);
        self.put(HISTORY, items(1, &values).message(2, step))?;
        self.last.extend(values);
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        if self.records == 0 { Ok(()) } else { self.summarize() }
    }
}

impl Drop for Wandb {
    fn drop(&mut self) {
        let begun = if self.records == 0 { self.introduce() } else { Ok(()) };
        let ran = SystemTime::now().duration_since(self.begun).unwrap_or_default().as_secs();
        let exit = ProtoMessage::new().int(1, thread::panicking().into()).int(2, ran as i64);
        // There is nowhere left to report a failure.
        let _ = begun.and_then(|()| self.summarize()).and_then(|()| self.put(EXIT, exit));
    }
}

/// Values by name as a field of many items. A name with dots or slashes is one key, not a path.
fn items(field: u32, values: &BTreeMap<String, String>) -> ProtoMessage {
    let item = |all: ProtoMessage, (name, value): (&String, &String)| {
        all.message(field, ProtoMessage::new().bytes(2, name).bytes(16, value))
    };
    values.iter().fold(ProtoMessage::new(), item)
}

/// A value as W&B writes it, in JSON with words for numbers that JSON lacks; none for a picture.
fn json(value: &Value) -> Option<String> {
    match value {
        Value::Scalar(x) => Some(literal(*x)),
        Value::Text(text) => Some(quoted(text)),
        Value::Histogram(histogram) => Some(bins(histogram)),
        Value::Image(_) => None,
    }
}

fn literal(x: f64) -> String {
    number(x).replace('"', "")
}

fn bins(histogram: &Histogram) -> String {
    let edges = [histogram.min].into_iter().chain(histogram.limits.iter().copied());
    let fields = [
        ("_type", quoted("histogram")),
        ("values", list(histogram.counts.iter().map(u64::to_string))),
        ("bins", list(edges.map(literal))),
    ];
    object(fields)
}

fn seconds(time: SystemTime) -> f64 {
    time.duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

/// A time since 1970 as `20261231_235959`, in UTC.
fn date(seconds: u64) -> String {
    let (year, month, day) = civil_date(seconds / 86_400);
    let second = seconds % 86_400;
    format!("{year:04}{month:02}{day:02}_{:02}{:02}{:02}", second / 3600, second / 60 % 60, second % 60)
}
