//! The stages `tensorboard` and `browser`: what a small run writes, in the eyes of those who read it.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use crate::{repo, stages};

/// Where TensorBoard is installed, and what of it.
pub(crate) const TENSORBOARD: &str = "target/tensorboard-2.21.0";
pub(crate) const PACKAGE: &str = "tensorboard==2.21.0";

/// Where the run writes.
const FOLDER: &str = "target/watched";

/// TensorBoard's own reader finds what the lines of JSON of the run say.
pub(crate) fn run_tensorboard() -> Result<(), String> {
    write_run()?;
    let mut python = Command::new("python3");
    python.arg("watch/tests/tensorboard/read.py").arg(FOLDER).env("PYTHONPATH", TENSORBOARD);
    stages::run_command(&mut python, "python3 watch/tests/tensorboard/read.py")
}

/// A browser without a window builds the page without an error of its own, and draws it.
pub(crate) fn run_browser() -> Result<(), String> {
    write_run()?;
    let profile = fresh(&repo::root().join("target/browser-profile"))?;
    for (file, needed) in [
        ("report.html", &["Configuration", "Curves", "Timeline", "Memory", "<svg"][..]),
        ("curves.svg", &["<path"]),
        ("trace.svg", &["<rect"]),
    ] {
        let page = format!("file://{}", repo::root().join(FOLDER).join(file).display());
        let seen = output(chromium(&profile).arg("--dump-dom").arg(&page))?;
        let missing: Vec<&&str> = needed.iter().filter(|part| !seen.contains(**part)).collect();
        // What is no XML has a box with this text in it; what a page was told not to load is said on standard error.
        if !missing.is_empty() || seen.contains("parsererror") {
            return Err(format!("{file}: the browser's page lacks {missing:?}, or is malformed"));
        }
        let picture = repo::root().join(FOLDER).join(file).with_extension(format!("{}.png", extension(file)));
        let shot = format!("--screenshot={}", picture.display());
        output(chromium(&profile).arg("--window-size=1300,2600").arg(shot).arg(&page))?;
        // A page without anything drawn is a few thousand bytes.
        let bytes = fs::metadata(&picture).map_err(|error| format!("{}: {error}", picture.display()))?.len();
        if bytes < 20_000 {
            return Err(format!("{}: {bytes} bytes are a picture of nothing", picture.display()));
        }
        println!("{} ({bytes} bytes)", picture.display());
    }
    Ok(())
}

fn extension(file: &str) -> &str {
    file.rsplit('.').next().unwrap_or_default()
}

fn write_run() -> Result<(), String> {
    fresh(&repo::root().join(FOLDER))?;
    stages::run_cargo(&["run", "-p", "weftgrad-train", "--example", "watched", "--", FOLDER], &[])
}

/// An empty folder.
fn fresh(folder: &Path) -> Result<PathBuf, String> {
    if folder.exists() {
        fs::remove_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    }
    fs::create_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    Ok(folder.into())
}

fn chromium(profile: &Path) -> Command {
    let mut command = Command::new("chromium");
    command.args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]);
    command.arg(format!("--user-data-dir={}", profile.display()));
    command
}

fn output(command: &mut Command) -> Result<String, String> {
    let done = command.output().map_err(|error| format!("the browser could not be started: {error}"))?;
    if !done.status.success() {
        return Err(format!("the browser failed: {}\n{}", done.status, String::from_utf8_lossy(&done.stderr)));
    }
    Ok(String::from_utf8_lossy(&done.stdout).into_owned())
}
