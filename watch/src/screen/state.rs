//! [`RunScreen`]: the runs of a screen, and the choices made by keys.

use std::{
    ops::ControlFlow,
    path::{Path, PathBuf},
};

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::follow::FollowedRun;

/// Runs, and the shown part of them.
#[derive(Debug)]
pub(super) struct RunScreen {
    pub runs: Vec<ShownRun>,
    /// The titles of all charts; those of losses come first.
    pub titles: Vec<String>,
    /// The title of the chosen chart.
    pub chosen: String,
    /// The index of the chosen weight in [`SMOOTHING`].
    pub smoothing: usize,
    /// The last `1 / 2^zoom` of the steps are shown.
    pub zoom: u32,
    /// The run whose ranks are shown.
    pub of_ranks: usize,
}

/// A run on the screen.
#[derive(Debug)]
pub(super) struct ShownRun {
    pub name: String,
    pub file: FollowedRun,
    /// The error of the last attempt to read the file.
    pub error: Option<String>,
}

/// The weights of earlier values in a smoothed curve.
pub(super) const SMOOTHING: [f64; 4] = [0.0, 0.6, 0.9, 0.98];
const MOST_ZOOM: u32 = 16;

impl RunScreen {
    pub(super) fn of(runs: &[PathBuf]) -> Self {
        let names: Vec<String> = runs.iter().map(|run| name_of(run)).collect();
        let shown = |(run, name): (&PathBuf, &String)| {
            let is_unique = names.iter().filter(|other| *other == name).count() == 1;
            let name = if is_unique { name.clone() } else { run.display().to_string() };
            ShownRun { name, file: FollowedRun::of(file_of(run)), error: None }
        };
        let runs = runs.iter().zip(&names).map(shown).collect();
        RunScreen { runs, titles: Vec::new(), chosen: String::new(), smoothing: 0, zoom: 0, of_ranks: 0 }
    }

    /// Reads what runs have written since the last call.
    pub(super) fn read(&mut self) {
        for run in &mut self.runs {
            run.error = run.file.read().err().map(|error| error.to_string());
        }
        self.titles.clear();
        for chart in self.runs.iter().flat_map(|run| run.file.charts()) {
            if !self.titles.contains(&chart.title) {
                self.titles.push(chart.title.clone());
            }
        }
        self.titles.sort_by_key(|title| !title.contains("loss"));
        if !self.titles.contains(&self.chosen) {
            self.chosen = self.titles.first().cloned().unwrap_or_default();
        }
    }

    /// Obeys a key; breaks if it ends the screen.
    pub(super) fn press(&mut self, key: KeyEvent) -> ControlFlow<()> {
        match key.code {
            KeyCode::Char('q') | KeyCode::Esc => return ControlFlow::Break(()),
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return ControlFlow::Break(()),
            KeyCode::Down | KeyCode::Right | KeyCode::Char('j') => self.choose(1),
            KeyCode::Up | KeyCode::Left | KeyCode::Char('k') => self.choose(self.titles.len().saturating_sub(1)),
            KeyCode::Char('s') => self.smoothing = (self.smoothing + 1) % SMOOTHING.len(),
            KeyCode::Char('+' | '=') => self.zoom = (self.zoom + 1).min(MOST_ZOOM),
            KeyCode::Char('-') => self.zoom = self.zoom.saturating_sub(1),
            KeyCode::Tab => self.of_ranks = (self.of_ranks + 1) % self.runs.len().max(1),
            _ => {}
        }
        ControlFlow::Continue(())
    }

    /// Chooses the chart that comes `by` places later.
    fn choose(&mut self, by: usize) {
        let at = self.titles.iter().position(|title| *title == self.chosen).unwrap_or(0);
        if let Some(title) = self.titles.get((at + by) % self.titles.len().max(1)) {
            self.chosen = title.clone();
        }
    }
}

/// The file of a run's numbers, in its folder or itself.
fn file_of(run: &Path) -> PathBuf {
    if run.extension().is_some_and(|extension| extension == "jsonl") { run.into() } else { run.join("metrics.jsonl") }
}

/// The name of a run's folder.
fn name_of(run: &Path) -> String {
    let file = file_of(run);
    let folder = file.parent().and_then(Path::file_name);
    folder.map_or_else(|| run.display().to_string(), |name| name.to_string_lossy().into_owned())
}
