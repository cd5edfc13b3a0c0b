//! The folder checkpoints lie in.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
};

use numcore::{Error, Result, safetensors};

/// The file that is written last.
pub(super) const MANIFEST: &str = "manifest.json";
/// The file that names the last complete checkpoint.
const LATEST: &str = "latest";
/// How the names of folders begin: of whole ones, of one that is about to be replaced by a whole one, of one that is being written.
const WHOLE: &str = "step-";
const REPLACED: &str = "replaced-";
const UNFINISHED: &str = "unfinished-";

/// A folder of checkpoints.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Folder(PathBuf);

impl Folder {
    /// The folder at a path; it is made by the first save.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Folder(path.into())
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Steps of the complete checkpoints, in ascending order.
    pub fn steps(&self) -> Result<Vec<u64>> {
        let entries = match fs::read_dir(&self.0) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(|e| Error::io(&self.0, e))?,
        };
        let step = |entry: std::io::Result<fs::DirEntry>| {
            let path = entry.ok()?.path();
            let name = path.file_name()?.to_str()?;
            let step = [WHOLE, REPLACED].iter().find_map(|prefix| name.strip_prefix(prefix))?.parse().ok()?;
            path.join(MANIFEST).is_file().then_some(step)
        };
        let mut steps: Vec<u64> = entries.filter_map(step).collect();
        steps.sort_unstable();
        steps.dedup();
        Ok(steps)
    }

    /// The step of the last complete checkpoint, if there is one. A `latest` that was lost, or names what is not there, does no harm.
    pub fn latest(&self) -> Result<Option<u64>> {
        let steps = self.steps()?;
        let named = fs::read_to_string(self.0.join(LATEST)).ok().and_then(|s| s.trim().parse().ok());
        Ok(named.filter(|s| steps.contains(s)).or(steps.last().copied()))
    }

    /// Where the checkpoint of a step lies.
    pub fn step(&self, step: u64) -> PathBuf {
        let [whole, replaced] = [WHOLE, REPLACED].map(|prefix| self.0.join(format!("{prefix}{step:010}")));
        // Between two renames of a save that replaces a step, the old one is what there is.
        if !whole.exists() && replaced.exists() { replaced } else { whole }
    }

    /// Where it is written. What an interrupted save left there is removed.
    pub(super) fn begin(&self, step: u64) -> Result<PathBuf> {
        let path = self.unfinished(step);
        if path.exists() {
            fs::remove_dir_all(&path).map_err(|e| Error::io(&path, e))?;
        }
        fs::create_dir_all(&path).map_err(|e| Error::io(&path, e))?;
        Ok(path)
    }

    pub(super) fn unfinished(&self, step: u64) -> PathBuf {
        self.0.join(format!("{UNFINISHED}{step:010}"))
    }

    /// Makes a checkpoint visible, all at once.
    pub(super) fn publish(&self, step: u64) -> Result<()> {
        let from = self.unfinished(step);
        let [to, old] = [WHOLE, REPLACED].map(|prefix| self.0.join(format!("{prefix}{step:010}")));
        let rename = |from: &Path, to: &Path| fs::rename(from, to).map_err(|e| Error::io(to, e));
        let remove = |path: &Path| fs::remove_dir_all(path).map_err(|e| Error::io(path, e));
        if to.exists() {
            if old.exists() {
                remove(&old)?;
            }
            rename(&to, &old)?;
        }
        rename(&from, &to)?;
        if old.exists() {
            remove(&old)?;
        }
        sync(&self.0)?;
        safetensors::replace_file(self.0.join(LATEST), step.to_string().as_bytes())
    }

    /// Removes all but the last `keep` complete checkpoints.
    pub fn prune(&self, keep: usize) -> Result<()> {
        let (steps, latest) = (self.steps()?, self.latest()?);
        let old = steps.len().saturating_sub(keep.max(1));
        for step in steps[..old].iter().filter(|s| Some(**s) != latest) {
            let path = self.step(*step);
            fs::remove_dir_all(&path).map_err(|e| Error::io(&path, e))?;
        }
        Ok(())
    }
}

/// Makes renames in a folder last through a loss of power.
fn sync(folder: &Path) -> Result<()> {
    File::open(folder).and_then(|f| f.sync_all()).map_err(|e| Error::io(folder, e))
}
