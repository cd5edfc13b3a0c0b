//! Schedules as CSV: one row per rank, one column per time step, empty cells for idle steps, no header.

use std::fmt::Write as _;

use numcore::{Error, Result};

use super::action::Action;
use super::costs::Costs;
use super::placement::Placement;
use super::play::{Sends, play};
use super::schedule::Schedule;

const WHAT: &str = "pipeline CSV";

impl Schedule {
    /// Reads a schedule. Empty cells are skipped: the order within a row is all that counts. Stages live where the rows say,
    /// and there are as many micro-batches as the largest one named says.
    ///
    /// # Errors
    /// Names row and column (from 1) of a cell that is no action, or whose stage another row has too; or the stage that no row has.
    pub fn from_csv(text: &str) -> Result<Self> {
        let rows =
            text.trim_end().lines().enumerate().map(|(row, line)| parse_row(row, line)).collect::<Result<Vec<_>>>()?;
        let placement = infer_placement(&rows)?;
        let rows: Vec<Vec<Action>> =
            rows.into_iter().map(|row| row.into_iter().map(|cell| cell.action).collect()).collect();
        let micros = rows.iter().flatten().flat_map(Action::micros).max().map_or(0, |last| last.saturating_add(1));
        Schedule::new(placement, micros, rows)
    }

    /// Writes the schedule. Columns are the steps it would take if every action, and every message with both its ends, took
    /// one step; a schedule that cannot end is written without idle cells.
    pub fn to_csv(&self) -> String {
        let comm = u64::from(self.is_lowered());
        let steps = play(self, &Costs::steps().with_comm(comm), Sends::Synchronous).ok();
        let mut text = String::new();
        for (rank, row) in self.rows().iter().enumerate() {
            let mut column = 0;
            for (position, action) in row.iter().enumerate() {
                let step = steps.as_ref().map_or(position, |spans| spans[rank][position].start as usize);
                let _ = write!(text, "{}{action}", ",".repeat(step - column));
                column = step;
            }
            text.push('\n');
        }
        text
    }
}

struct Cell {
    row: usize,
    column: usize,
    action: Action,
}

fn parse_row(row: usize, line: &str) -> Result<Vec<Cell>> {
    let cells = line.split(',').enumerate().filter(|(_, cell)| !cell.trim().is_empty());
    let parse = |(column, cell): (usize, &str)| match cell.parse() {
        Ok(action) => Ok(Cell { row, column, action }),
        Err(error) => Err(at(row, column, format!("{error}"))),
    };
    cells.map(parse).collect()
}

fn at(row: usize, column: usize, why: String) -> Error {
    Error::format(WHAT, format!("row {}, column {}: {why}", row + 1, column + 1))
}

fn infer_placement(rows: &[Vec<Cell>]) -> Result<Placement> {
    let mut seen: Vec<(usize, &Cell)> =
        rows.iter().flatten().flat_map(|cell| cell.action.stages().map(move |stage| (stage, cell))).collect();
    seen.sort_by_key(|(stage, _)| *stage);
    let mut rank_of: Vec<usize> = Vec::new();
    for (stage, cell) in seen {
        match rank_of.get(stage) {
            None if stage == rank_of.len() => rank_of.push(cell.row),
            None => return Err(Error::format(WHAT, format!("no row has stage {}", rank_of.len()))),
            Some(&row) if row != cell.row => {
                let why = format!("{}: stage {stage} lives in row {} already", cell.action, row + 1);
                return Err(at(cell.row, cell.column, why));
            }
            Some(_) => {}
        }
    }
    Placement::new(rank_of)
}
