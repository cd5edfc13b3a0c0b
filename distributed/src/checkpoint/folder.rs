//! The folder checkpoints lie in.

use std::{
    ffi::OsStr,
    fmt, fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use numcore::{Error, Result, safetensors};

/// The file that is written last.
pub(super) const MANIFEST: &str = "manifest.json";
/// The file that names the last checkpoint: a line with the step that is about to be moved into place, and one with what was the last before.
const LATEST: &str = "latest";
/// How the names of folders begin: of whole ones, of one that is about to be replaced by a whole one, of one that is being written, of one that is being removed.
const WHOLE: &str = "step-";
const REPLACED: &str = "replaced-";
const UNFINISHED: &str = "unfinished-";
const REMOVED: &str = "removed-";
/// And of those that ranks write who cannot tell each other anything.
const STRANDED: &str = "stranded-";

/// Told of a change in the file system before it is made.
type Watch = Arc<dyn Fn(&'static str) -> Result<()> + Send + Sync>;

/// A folder of checkpoints.
#[derive(Clone)]
pub struct Folder {
    path: PathBuf,
    watch: Option<Watch>,
    /// How long a run waits until another one has left the folder, if that was said.
    pub(super) lock_wait: Option<Duration>,
}

impl Folder {
    /// The folder at a path; it is made by the first save.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Folder { path: path.into(), watch: None, lock_wait: None }
    }

    /// This folder, watched: before each change that a save or [`prune`](Folder::prune) makes in the file system, `watch` is told which, on the
    /// rank that makes it. An error of it ends the save there: for tests of what is left then.
    pub fn watched(self, watch: impl Fn(&'static str) -> Result<()> + Send + Sync + 'static) -> Self {
        Folder { watch: Some(Arc::new(watch)), ..self }
    }

    /// The path of the folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Steps of the complete checkpoints, in ascending order.
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

    /// The step of the checkpoint that was completed last, if there is one: not the highest, if a run went back and saves on from there.
    /// It is the new one as soon as that is in its place, whether or not its save returned. A `latest` that was lost, or names what is
    /// not there, does no harm: the highest step is taken.
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

    /// Gives a step a name, in a file of this name in the folder, in place of the step that had it: `best`.
    pub fn mark(&self, name: &'static str, step: u64) -> Result<()> {
        self.will("mark a checkpoint")?;
        safetensors::replace_file(self.path.join(name), step.to_string().as_bytes())
    }

    /// The step that was [given](Folder::mark) a name, if there is a checkpoint of it.
    pub fn marked(&self, name: &'static str) -> Result<Option<u64>> {
        let path = self.path.join(name);
        let text = match fs::read_to_string(&path) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            text => text.map_err(|e| Error::io(&path, e))?,
        };
        let step = text.trim().parse().map_err(|_| Error::format(path.display().to_string(), "names no step"))?;
        Ok(self.steps()?.contains(&step).then_some(step))
    }

    /// Where the checkpoint of a step lies.
    pub fn step(&self, step: u64) -> PathBuf {
        let [whole, replaced] = [WHOLE, REPLACED].map(|prefix| self.at(prefix, step));
        // Between two renames of a save that replaces a step, the old one is what there is.
        if !whole.exists() && replaced.exists() { replaced } else { whole }
    }

    /// Makes the folder `at`, in which a checkpoint of `step` is written. What earlier saves of this step have left is removed; not what a later one writes, if this is that
    /// of ranks which were given up. Gives the latest step at that time.
    pub(super) fn begin(&self, step: u64, at: &Path) -> Result<Option<u64>> {
        let (of_step, own) = (format!("{UNFINISHED}{step:010}"), at.file_name().unwrap_or_default());
        self.remove_left(|name| name.to_string_lossy().starts_with(&of_step) && name < own)?;
        self.will("make a folder")?;
        create_all(at)?;
        self.latest()
    }

    /// An error if another save has published what is the latest meanwhile: ranks that were given up as lost, stopped within a save, may wake when the others have gone on.
    pub(super) fn check_latest(&self, step: u64, before: Option<u64>) -> Result<()> {
        match self.latest()? {
            now if now == before => Ok(()),
            now => {
                let now = now.map_or("nothing".into(), |now| format!("step {now}"));
                let why = format!(
                    "while step {step} was saved, another save made {now} the latest in {}: were these ranks left behind?",
                    self.path.display()
                );
                Err(Error::argument("Folder::save", why))
            }
        }
    }

    /// Where ranks that cannot tell each other anything write one.
    pub(super) fn stranded(&self, step: u64, run: &str) -> PathBuf {
        self.path.join(format!("{STRANDED}{step:010}-{run}"))
    }

    /// Removes what ranks of failed worlds, and saves that were cut short, have left: what was not published, or
    /// not removed to its end, when they ended. No save may be under way.
    pub fn remove_stranded(&self) -> Result<()> {
        self.remove_left(|name| {
            [STRANDED, UNFINISHED, REMOVED].iter().any(|prefix| name.to_string_lossy().starts_with(prefix))
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

    /// Where a save writes a checkpoint; `save` is a name that its ranks share, and that is greater than those of earlier saves: a rank that was given up, and wakes later,
    /// writes nothing into the folder of those that went on.
    pub(super) fn unfinished(&self, step: u64, save: &str) -> PathBuf {
        self.path.join(format!("{UNFINISHED}{step:010}-{save}"))
    }

    /// A change is about to be made.
    pub(super) fn will(&self, change: &'static str) -> Result<()> {
        self.watch.as_ref().map_or(Ok(()), |watch| watch(change))
    }

    /// Makes the checkpoint that was written in the folder `from` visible, all at once, and the last one with that.
    pub(super) fn publish(&self, step: u64, from: &Path) -> Result<()> {
        let last = self.latest()?;
        let [to, old] = [WHOLE, REPLACED].map(|prefix| self.at(prefix, step));
        if to.exists() {
            if old.exists() {
                self.remove("remove the old one", &old)?;
            }
            // What `latest` says of this step as the next one must not be read once its folder is away.
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

    /// Removes all but the last `keep` complete checkpoints.
    pub fn prune(&self, keep: usize) -> Result<()> {
        self.prune_except(keep, &[])
    }

    /// Removes all but the last `keep` complete checkpoints and those of the steps `also`: the best one, for example.
    pub fn prune_except(&self, keep: usize, also: &[u64]) -> Result<()> {
        let (steps, latest) = (self.steps()?, self.latest()?);
        let old = steps.len().saturating_sub(keep.max(1));
        for step in steps[..old].iter().filter(|s| Some(**s) != latest && !also.contains(s)) {
            self.remove_step(*step)?;
        }
        Ok(())
    }

    /// Removes all checkpoints.
    pub fn clear(&self) -> Result<()> {
        self.steps()?.into_iter().try_for_each(|step| self.remove_step(step))
    }

    fn remove_step(&self, step: u64) -> Result<()> {
        // What a save replaced, and could not remove, would be the checkpoint of this step again if the new one went before it.
        let (there, removed) = ([REPLACED, WHOLE].map(|prefix| self.at(prefix, step)), self.at(REMOVED, step));
        for path in there.iter().filter(|path| path.is_dir()) {
            if removed.exists() {
                self.remove("remove what was left over", &removed)?;
            }
            // First, so that what is left of an interrupted removal is no checkpoint, and is known to be left over.
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

/// Makes a folder and its parents, so that they last through a loss of power; gives the folders in which something is new.
pub(super) fn create_all(path: &Path) -> Result<Vec<PathBuf>> {
    let parent = |path: &Path| path.parent().map(|p| if p.as_os_str().is_empty() { Path::new(".") } else { p }.into());
    let missing = |path: &&Path| !path.as_os_str().is_empty() && !path.exists();
    let changed: Vec<PathBuf> = path.ancestors().take_while(missing).filter_map(parent).collect();
    fs::create_dir_all(path).map_err(|e| Error::io(path, e))?;
    changed.iter().try_for_each(|folder| sync(folder))?;
    Ok(changed)
}

/// Makes renames in a folder last through a loss of power. Where folders cannot be opened there is nothing to do.
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
