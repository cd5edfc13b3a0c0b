//! [`Mlflow`]: a run in MLflow's folder of files.

use std::{
    collections::BTreeMap,
    fs::{self, File, OpenOptions},
    io::Write,
    path::{Path, PathBuf, absolute},
    thread,
    time::{SystemTime, UNIX_EPOCH},
};

use numcore::{Error, Result, Within, safetensors::replace_file};

use super::{Record, Sink, random};

/// Writes a run into a folder that `mlflow ui --backend-store-uri FOLDER` shows: numbers as metrics, options as
/// parameters. Texts, histograms and pictures are left out.
///
/// The run is `RUNNING` until the sink is dropped, then `FINISHED`, or `FAILED` if that happens in a panic. MLflow 3.7
/// and later want `MLFLOW_ALLOW_FILE_STORE=true` for folders.
///
/// ```no_run
/// use watch::sink::{Mlflow, Record, Sink};
/// # fn main() -> numcore::Result<()> {
/// let mut sink = Mlflow::in_folder("mlruns", "language models", "first")?.configuration([("lr", "3e-4")])?;
/// sink.write(&Record::new(1, 0).scalar("loss", 2.5))?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Mlflow {
    folder: PathBuf,
    experiment: String,
    name: String,
    begun: u128,
    /// The file of each metric, and its path below the folder of metrics.
    metrics: BTreeMap<String, (PathBuf, File)>,
}

/// States of a run, by MLflow's numbers.
const RUNNING: u8 = 1;
const FINISHED: u8 = 3;
const FAILED: u8 = 4;

impl Mlflow {
    /// Begins a run of this name, in an experiment that is made if the folder has none of its name.
    ///
    /// # Errors
    /// An error if a file or a folder cannot be read or made.
    #[track_caller]
    pub fn in_folder(folder: impl AsRef<Path>, experiment: &str, name: &str) -> Result<Self> {
        Self::begin(folder.as_ref(), experiment, name).at_caller()
    }

    fn begin(folder: &Path, experiment: &str, name: &str) -> Result<Self> {
        fs::create_dir_all(folder).map_err(|e| Error::io(folder, e))?;
        let folder = absolute(folder).map_err(|e| Error::io(folder, e))?;
        let id = match known(&folder, experiment)? {
            Some(id) => id,
            None => {
                let id = format!("{:018}", random()? % 1_000_000_000_000_000_000);
                let (at, now) = (folder.join(&id), millis(SystemTime::now()));
                let meta = [
                    ("artifact_location", uri(&at)),
                    ("creation_time", now.to_string()),
                    ("experiment_id", quoted(&id)),
                    ("last_update_time", now.to_string()),
                    ("lifecycle_stage", "active".into()),
                    ("name", quoted(experiment)),
                ];
                put(&at.join("meta.yaml"), &yaml(&meta))?;
                id
            }
        };
        let run = format!("{:016x}{:016x}", random()?, random()?);
        let (folder, begun) = (folder.join(&id).join(run), millis(SystemTime::now()));
        let sink = Mlflow { folder, experiment: id, name: name.into(), begun, metrics: BTreeMap::new() };
        sink.tell(RUNNING, None)?;
        put(&sink.folder.join("tags/mlflow.runName"), name)?;
        for part in ["artifacts", "metrics", "params"] {
            let part = sink.folder.join(part);
            fs::create_dir_all(&part).map_err(|e| Error::io(part, e))?;
        }
        Ok(sink)
    }

    /// Writes options of the run.
    ///
    /// # Errors
    /// An error if a file cannot be written.
    #[track_caller]
    pub fn configuration<K: AsRef<str>, V: AsRef<str>>(
        self,
        options: impl IntoIterator<Item = (K, V)>,
    ) -> Result<Self> {
        let mut places: Vec<PathBuf> = Vec::new();
        for (name, value) in options {
            let place = free_place(name.as_ref(), places.iter());
            put(&self.folder.join("params").join(&place), value.as_ref()).at_caller()?;
            places.push(place);
        }
        Ok(self)
    }

    /// The folder of the run.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Writes what the run is, and its state.
    fn tell(&self, status: u8, end: Option<u128>) -> Result<()> {
        let id = self.folder.file_name().map(|id| id.to_string_lossy().into_owned()).unwrap_or_default();
        let meta = [
            ("artifact_uri", uri(&self.folder.join("artifacts"))),
            ("end_time", end.map_or("null".into(), |end| end.to_string())),
            ("entry_point_name", quoted("")),
            ("experiment_id", quoted(&self.experiment)),
            ("lifecycle_stage", "active".into()),
            ("run_id", quoted(&id)),
            ("run_name", quoted(&self.name)),
            ("run_uuid", quoted(&id)),
            ("source_name", quoted("")),
            ("source_type", "4".into()),
            ("source_version", quoted("")),
            ("start_time", self.begun.to_string()),
            ("status", status.to_string()),
            ("tags", "[]".into()),
            ("user_id", quoted("")),
        ];
        put(&self.folder.join("meta.yaml"), &yaml(&meta))
    }
}

impl Sink for Mlflow {
    fn write(&mut self, record: &Record) -> Result<()> {
        for (name, x) in record.scalars() {
            let number = if x.is_nan() { "nan".into() } else { x.to_string() };
            let line = format!("{} {number} {}\n", millis(record.time), record.step);
            let folder = self.folder.join("metrics");
            if !self.metrics.contains_key(name) {
                let place = free_place(name, self.metrics.values().map(|(place, _)| place));
                let path = folder.join(&place);
                let opened = make_parent(&path).and_then(|()| OpenOptions::new().append(true).create(true).open(&path));
                self.metrics.insert(name.into(), (place, opened.map_err(|e| Error::io(&path, e))?));
            }
            if let Some((place, file)) = self.metrics.get_mut(name) {
                file.write_all(line.as_bytes()).map_err(|e| Error::io(folder.join(place), e))?;
            }
        }
        Ok(())
    }
}

impl Drop for Mlflow {
    fn drop(&mut self) {
        let status = if thread::panicking() { FAILED } else { FINISHED };
        // There is nowhere left to report a failure.
        let _ = self.tell(status, Some(millis(SystemTime::now())));
    }
}

/// The number of the experiment of this name.
fn known(folder: &Path, experiment: &str) -> Result<Option<String>> {
    let line = format!("name: {}", quoted(experiment));
    // MLflow itself writes plain names without quotes.
    let bare = format!("name: {experiment}");
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).map_err(|e| Error::io(folder, e))? {
        let entry = entry.map_err(|e| Error::io(folder, e))?;
        let meta = fs::read_to_string(entry.path().join("meta.yaml")).unwrap_or_default();
        if meta.lines().any(|own| own == line || own == bare) {
            found.extend(entry.file_name().into_string());
        }
    }
    Ok(found.into_iter().min())
}

/// The path of a name in the folder: parts between slashes, of characters that MLflow allows.
fn plain(name: &str) -> PathBuf {
    let allowed = |c: char| if c.is_ascii_alphanumeric() || "_-. :".contains(c) { c } else { '_' };
    let part = |part: &str| match part {
        "" | "." | ".." => "_".into(),
        part => part.chars().map(allowed).collect::<String>(),
    };
    name.split('/').map(part).collect()
}

/// The path of a name, changed where a file or a folder of another name is in its way: `loss/validation` beside `loss`.
fn free_place<'a>(name: &str, taken: impl Iterator<Item = &'a PathBuf> + Clone) -> PathBuf {
    let mut place = plain(name);
    if taken.clone().any(|other| place.starts_with(other) && place != *other) {
        place = place.to_string_lossy().replace(['/', '\\'], "_").into();
    }
    while taken.clone().any(|other| other.starts_with(&place)) {
        place.as_mut_os_string().push("_");
    }
    place
}

fn yaml(fields: &[(&str, String)]) -> String {
    fields.iter().map(|(name, value)| format!("{name}: {value}\n")).collect()
}

/// A text in YAML, on one line.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "''").replace(char::is_control, " "))
}

fn uri(path: &Path) -> String {
    let escaped = path.display().to_string().replace('%', "%25").replace('#', "%23").replace('?', "%3F");
    quoted(&format!("file://{escaped}"))
}

fn millis(time: SystemTime) -> u128 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis())
}

fn make_parent(path: &Path) -> std::io::Result<()> {
    path.parent().map_or(Ok(()), fs::create_dir_all)
}

fn put(path: &Path, text: &str) -> Result<()> {
    make_parent(path).map_err(|e| Error::io(path, e))?;
    replace_file(path, text.as_bytes())
}
