//! The folder of checkpoints, and its steps, names and renames.

use std::{
    ffi::OsStr,
    fmt, fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use numcore::{Error, Result, safetensors};

/// The name of the file that is written last.
pub(super) const MANIFEST: &str = "manifest.json";
/// The name of the file that names the last checkpoint. It has a line with the step that is about to be moved into
/// place, and one with its predecessor.
const LATEST: &str = "latest";
/// The prefixes of folder names: of complete checkpoints, of one about to be replaced, of one being written, of one
/// being removed.
const WHOLE: &str = "step-";
const REPLACED: &str = "replaced-";
const UNFINISHED: &str = "unfinished-";
const REMOVED: &str = "removed-";
/// The prefix of folders written by ranks of a failed world, which can no longer communicate.
const ORPHANED: &str = "stranded-";

/// A callback that is called before each change in the file system.
type Watch = Arc<dyn Fn(&'static str) -> Result<()> + Send + Sync>;

/// A folder of checkpoints.
#[derive(Clone)]
pub struct Folder {
    path: PathBuf,
    watch: Option<Watch>,
    /// The time for which a run waits until another one has left the folder, if it was set.
    pub(super) lock_wait: Option<Duration>,
}

impl Folder {
    /// Names the folder at a path, without access to the file system. The first save or [`lock`](Folder::lock) creates
    /// it, with its parents.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Folder { path: path.into(), watch: None, lock_wait: None }
    }

    /// Watches this folder, to test the state that an interrupted save leaves. Before each change that a save or
    /// [`prune`](Folder::prune) makes in the file system, the rank that makes it calls `watch` with its description. An
    /// error of `watch` ends the save there.
    pub fn watched(self, watch: impl Fn(&'static str) -> Result<()> + Send + Sync + 'static) -> Self {
        Folder { watch: Some(Arc::new(watch)), ..self }
    }

    /// The path of the folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The steps of the complete checkpoints, in ascending order.
    pub fn steps(&self) -> Result<Vec<u64>> {
        let entries = match fs::read_dir(&self.path) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(|e| Error::io(&self.path, e))?,
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

    /// The step of the checkpoint that was completed last, if there is one. It is not the highest if a run went back
    /// and saves on from there. A new checkpoint counts as soon as it is in its place, whether or not its save
    /// returned. If `latest` is lost, or names a missing checkpoint, the highest step is taken.
    pub fn latest(&self) -> Result<Option<u64>> {
        let steps = self.steps()?;
        let text = fs::read_to_string(self.path.join(LATEST)).unwrap_or_default();
        let named: Vec<u64> = text.lines().map_while(|line| line.trim().parse().ok()).collect();
        let last = match named[..] {
            [next, _] if self.at(WHOLE, next).join(MANIFEST).is_file() => Some(next),
            _ => named.last().copied(),
        };
        Ok(last.filter(|s| steps.contains(s)).or(steps.last().copied()))
    }

    /// Gives a step a name such as `best`, in a file of this name in the folder. Replaces the step that had the name.
    pub fn mark(&self, name: &'static str, step: u64) -> Result<()> {
        self.will("mark a checkpoint")?;
        safetensors::replace_file(self.path.join(name), step.to_string().as_bytes())
    }

    /// The step that [`mark`](Folder::mark) stored under a name, such as `best`. `None` if there is none, or its
    /// checkpoint is gone.
    pub fn marked(&self, name: &'static str) -> Result<Option<u64>> {
        let path = self.path.join(name);
        let text = match fs::read_to_string(&path) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            text => text.map_err(|e| Error::io(&path, e))?,
        };
        let step = text.trim().parse().map_err(|_| Error::format(path.display().to_string(), "names no step"))?;
        Ok(self.steps()?.contains(&step).then_some(step))
    }

    /// The path of the checkpoint of a step.
    pub fn step(&self, step: u64) -> PathBuf {
        let [whole, replaced] = [WHOLE, REPLACED].map(|prefix| self.at(prefix, step));
        // Between the two renames of a save that replaces a step, only the old one exists.
        if !whole.exists() && replaced.exists() { replaced } else { whole }
    }

    /// Creates the folder `at`, in which a checkpoint of `step` is written, and returns the latest step at that time.
    /// Removes leftovers of earlier saves of this step, but not the folder of a later save: these ranks may have been
    /// given up as lost.
    pub(super) fn begin(&self, step: u64, at: &Path) -> Result<Option<u64>> {
        let (of_step, own) = (format!("{UNFINISHED}{step:010}"), at.file_name().unwrap_or_default());
        self.remove_left(|name| name.to_string_lossy().starts_with(&of_step) && name < own)?;
        self.will("make a folder")?;
        create_all(at)?;
        self.latest()
    }

    /// An error unless the latest step is still `before`. Ranks that were given up as lost, stopped within a save, may
    /// wake when the others have gone on and published another checkpoint.
    pub(super) fn check_latest(&self, step: u64, before: Option<u64>) -> Result<()> {
        match self.latest()? {
            now if now == before => Ok(()),
            now => {
                let now = now.map_or("nothing".into(), |now| format!("step {now}"));
                let why = format!(
                    "while step {step} was saved, another save made {now} the latest in {}: are these ranks of a world that was replaced?",
                    self.path.display()
                );
                Err(Error::usage("Folder::save", why))
            }
        }
    }

    /// The folder in which ranks of a failed world, which can no longer communicate, write a checkpoint.
    pub(super) fn orphaned(&self, step: u64, run: &str) -> PathBuf {
        self.path.join(format!("{ORPHANED}{step:010}-{run}"))
    }

    /// Removes leftovers of failed worlds and interrupted saves: folders that were not published, or not removed to the
    /// end. No save may be under way.
    pub fn remove_orphaned(&self) -> Result<()> {
        self.remove_left(|name| {
            [ORPHANED, UNFINISHED, REMOVED].iter().any(|prefix| name.to_string_lossy().starts_with(prefix))
        })
    }

    /// Removes folders that no save will publish.
    fn remove_left(&self, is_left: impl Fn(&OsStr) -> bool) -> Result<()> {
        let entries = fs::read_dir(&self.path).into_iter().flatten();
        for path in entries.filter_map(|entry| Some(entry.ok()?.path())) {
            if path.file_name().is_some_and(&is_left) {
                self.remove("remove what was left over", &path)?;
            }
        }
        Ok(())
    }

    /// The folder in which a save writes a checkpoint. `save` is a name that its ranks share, greater than those of
    /// earlier saves. So a rank that was given up, and wakes later, writes nothing into the folder of the ranks that
    /// went on.
    pub(super) fn unfinished(&self, step: u64, save: &str) -> PathBuf {
        self.path.join(format!("{UNFINISHED}{step:010}-{save}"))
    }

    /// Announces a change to the watcher.
    pub(super) fn will(&self, change: &'static str) -> Result<()> {
        self.watch.as_ref().map_or(Ok(()), |watch| watch(change))
    }

    /// Makes the checkpoint that was written in the folder `from` visible, atomically, as the latest one.
    pub(super) fn publish(&self, step: u64, from: &Path) -> Result<()> {
        let last = self.latest()?;
        let [to, old] = [WHOLE, REPLACED].map(|prefix| self.at(prefix, step));
        if to.exists() {
            if old.exists() {
                self.remove("remove the old one", &old)?;
            }
            // `latest` must not name this step as the next one while its folder is moved away.
            self.name(&[last])?;
            self.rename("move the old one away", &to, &old)?;
        }
        self.name(&[Some(step), last])?;
        self.rename("move it into place", from, &to)?;
        sync(&self.path)?;
        if old.exists() {
            self.remove("remove the old one", &old)?;
        }
        Ok(())
    }

    /// Removes complete checkpoints except the `keep` highest steps (at least one) and the [`latest`](Folder::latest).
    pub fn prune(&self, keep: usize) -> Result<()> {
        self.prune_except(keep, &[])
    }

    /// Removes complete checkpoints as [`prune`](Folder::prune) does, but keeps the steps in `also`: the best one, for
    /// example.
    pub fn prune_except(&self, keep: usize, also: &[u64]) -> Result<()> {
        let (steps, latest) = (self.steps()?, self.latest()?);
        let old = steps.len().saturating_sub(keep.max(1));
        for step in steps[..old].iter().filter(|s| Some(**s) != latest && !also.contains(s)) {
            self.remove_step(*step)?;
        }
        Ok(())
    }

    /// Removes all complete checkpoints.
    pub fn clear(&self) -> Result<()> {
        self.steps()?.into_iter().try_for_each(|step| self.remove_step(step))
    }

    fn remove_step(&self, step: u64) -> Result<()> {
        // The replaced folder first: if it outlived the new one, it would count as the checkpoint of this step again.
        let (there, removed) = ([REPLACED, WHOLE].map(|prefix| self.at(prefix, step)), self.at(REMOVED, step));
        for path in there.iter().filter(|path| path.is_dir()) {
            if removed.exists() {
                self.remove("remove what was left over", &removed)?;
            }
            // Renamed first, so that an interrupted removal leaves no checkpoint, and its leftovers are known as such.
            self.rename("take a checkpoint away", path, &removed)?;
            self.remove("remove a checkpoint", &removed)?;
        }
        Ok(())
    }

    fn at(&self, prefix: &str, step: u64) -> PathBuf {
        self.path.join(format!("{prefix}{step:010}"))
    }

    fn name(&self, steps: &[Option<u64>]) -> Result<()> {
        self.will("write `latest`")?;
        let lines: Vec<String> = steps.iter().flatten().map(u64::to_string).collect();
        safetensors::replace_file(self.path.join(LATEST), lines.join("\n").as_bytes())
    }

    fn rename(&self, change: &'static str, from: &Path, to: &Path) -> Result<()> {
        self.will(change)?;
        fs::rename(from, to).map_err(|e| Error::io(to, e))
    }

    fn remove(&self, change: &'static str, path: &Path) -> Result<()> {
        self.will(change)?;
        fs::remove_dir_all(path).map_err(|e| Error::io(path, e))
    }
}

impl fmt::Debug for Folder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Folder").field(&self.path).finish()
    }
}

/// Creates a folder and its parents so that they survive a loss of power; returns the folders that got a new entry.
pub(super) fn create_all(path: &Path) -> Result<Vec<PathBuf>> {
    let parent = |path: &Path| path.parent().map(|p| if p.as_os_str().is_empty() { Path::new(".") } else { p }.into());
    let missing = |path: &&Path| !path.as_os_str().is_empty() && !path.exists();
    let changed: Vec<PathBuf> = path.ancestors().take_while(missing).filter_map(parent).collect();
    fs::create_dir_all(path).map_err(|e| Error::io(path, e))?;
    changed.iter().try_for_each(|folder| sync(folder))?;
    Ok(changed)
}

/// Makes renames in a folder survive a loss of power. Does nothing on systems that cannot open folders.
#[cfg(unix)]
fn sync(folder: &Path) -> Result<()> {
    fs::File::open(folder).and_then(|f| f.sync_all()).map_err(|e| Error::io(folder, e))
}

#[cfg(not(unix))]
fn sync(_: &Path) -> Result<()> {
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_folder_in_which_one_is_made_is_synced() {
        let base = std::env::temp_dir().join(format!("weftgrad-create-all-{}", std::process::id()));
        let _ = fs::remove_dir_all(&base);
        let all = ["a/b/step", "a/b", "a", ""].map(|p| base.join(p));
        let created = create_all(&all[0]).unwrap();
        let made = [base.join("a/b"), base.join("a"), base.clone(), std::env::temp_dir()];
        assert_eq!(created, made);
        assert!(all[0].is_dir());
        assert_eq!(create_all(&base.join("a/b/other")).unwrap(), [base.join("a/b")]);
        assert!(create_all(&all[0]).unwrap().is_empty());
        fs::write(base.join("file"), "in the way").unwrap();
        assert!(create_all(&base.join("file/x")).is_err());
        fs::remove_dir_all(&base).unwrap();
    }
}
