//! Schedules as CSV: everything written reads back; everything else is refused with its place.

use distributed::pipeline::{Kind, Lowering, Schedule, lower};

#[test]
fn every_schedule_reads_back() {
    let mut read = 0;
    for &kind in Kind::ALL {
        for (v, m, p) in (1..4).flat_map(|v| (1..9).flat_map(move |m| (1..5).map(move |p| (v, m, p)))) {
            let Ok(schedule) = kind.generate(p, v, m) else { continue };
            let lowered = lower(&schedule, &Lowering { sharded: m % 2 == 0, ..Lowering::default() }).unwrap();
            for schedule in [schedule, lowered] {
                assert_eq!(Schedule::from_csv(&schedule.to_csv()).unwrap(), schedule, "{kind} {v} {m} {p}");
                read += 1;
            }
        }
    }
    assert!(read > 400, "{read}");
}

#[test]
fn spaces_empty_cells_and_line_ends_do_not_matter() {
    let plain = Schedule::from_csv("0F0,0B0\n1F0,1B0\n").unwrap();
    assert_eq!(Schedule::from_csv(" 0F0 ,,, 0B0,\r\n,1F0,1B0,,\r\n\r\n").unwrap(), plain);
    assert_eq!(plain.to_csv(), "0F0,,,0B0\n,1F0,1B0\n");
}

/// What cannot be played has no steps; it is written as it stands.
#[test]
fn what_cannot_end_is_written_without_idle_cells() {
    let text = "0B0,0F0\n1F0,1B0\n";
    assert_eq!(Schedule::from_csv(text).unwrap().to_csv(), text);
}

fn expect_refused(text: &str, error: &str) {
    let got = Schedule::from_csv(text).unwrap_err().to_string();
    assert!(got.contains(error), "{text:?} gave {got:?}, not {error:?}");
}

#[test]
fn errors_name_row_and_column() {
    expect_refused(
        "0F0,0B0\n1F0,,1X0\n",
        "pipeline CSV: row 2, column 3: action `1X0`: expected stage, one of F B I W",
    );
    expect_refused("0F0\n1F0,0B0\n", "row 2, column 2: 0B0: stage 0 lives in row 1 already");
    expect_refused("0F0\n2F0\n", "no row has stage 1");
    expect_refused("0F99999999999\n", "100000000000 micro-batches, but only 1 actions");
    expect_refused("99999999999F0\n", "no row has stage 0");
    expect_refused("", "no stage at all");
    expect_refused("0F0\n\n1F0\n", "rank 1 of 3 has no stage");
}
