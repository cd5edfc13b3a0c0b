//! Columns of tables: scikit-learn's values, what is saved, and rows that are refused.

use data::{
    Dataset, Loader,
    columns::{FittedColumns, MissingValues, Scaling, TableColumns},
    sources::{Csv, JsonLines},
};
use serde_json::Value;

use crate::common::Folder;

fn reference() -> Value {
    serde_json::from_str(include_str!("../references/columns.json")).unwrap()
}

/// Rows `{"x": number}`.
fn lines(folder: &Folder, name: &str, values: &Value) -> JsonLines {
    let text: String = values.as_array().unwrap().iter().map(|x| format!("{{\"x\": {x}}}\n")).collect();
    JsonLines::open(folder.file(name, text)).unwrap()
}

/// The numbers of all rows.
fn numbers(fitted: &FittedColumns, rows: &JsonLines) -> Vec<Vec<f32>> {
    let row = |i| fitted.row(rows.get(i).unwrap()).unwrap().0.to_vec::<f32>().unwrap();
    (0..rows.len()).map(row).collect()
}

#[test]
fn numbers_are_scikit_learn_s() {
    let (folder, reference) = (Folder::new("columns"), reference());
    let training = lines(&folder, "training.jsonl", &reference["training"]);
    let other = lines(&folder, "other.jsonl", &reference["other"]);
    let constant = lines(&folder, "constant.jsonl", &serde_json::json!([2.5, 2.5, 2.5]));
    for (name, missing) in
        [("mean", MissingValues::Mean), ("median", MissingValues::Median), ("constant", MissingValues::Constant(-1.0))]
    {
        let fitted = TableColumns::new().flagged_number("x", missing, Scaling::None).fit(&training).unwrap();
        assert_eq!(fitted.width(), 2);
        for (found, due) in numbers(&fitted, &other).iter().zip(reference["filled"][name].as_array().unwrap()) {
            assert_eq!(found[0], due.as_f64().unwrap() as f32, "{name}");
        }
        assert!(numbers(&fitted, &other).iter().map(|row| row[1]).eq([0.0, 1.0, 0.0, 0.0]));
    }
    for (name, scaling) in [("standard", Scaling::Standard), ("min_max", Scaling::MinMax), ("robust", Scaling::Robust)]
    {
        for (name, rows) in [(name.to_owned(), &training), (format!("{name} constant"), &constant)] {
            let fitted = TableColumns::new().number("x", MissingValues::Mean, scaling).fit(rows).unwrap();
            for (found, due) in numbers(&fitted, &other).iter().zip(reference["scaled"][&name].as_array().unwrap()) {
                let Some(due) = due.as_f64() else { continue };
                assert!((f64::from(found[0]) - due).abs() < 1e-6, "{name}: {found:?} {due}");
            }
        }
    }
    // The value for a missing one is scaled too.
    let fitted = TableColumns::new().number("x", MissingValues::Mean, Scaling::Standard).fit(&training).unwrap();
    assert!(numbers(&fitted, &other)[1][0].abs() < 1e-6);
}

#[test]
fn categories_have_an_entry_for_others() {
    let (folder, reference) = (Folder::new("categories"), reference());
    let words: Vec<&str> = reference["words"].as_array().unwrap().iter().map(|word| word.as_str().unwrap()).collect();
    let text =
        |words: &[&str]| format!("color,size\n{}", words.iter().map(|word| format!("{word},7\n")).collect::<String>());
    let training = Csv::open(folder.file("training.csv", text(&words))).unwrap();
    let fitted = TableColumns::new().category("size").category("color").fit(&training).unwrap();
    assert_eq!((fitted.category_counts(), fitted.width()), (vec![2, 5], 0));
    let other = Csv::open(folder.file("other.csv", text(&["blue", " red", "pink", "Zinc", ""]))).unwrap();
    let code = |i| fitted.row(other.get(i).unwrap()).unwrap().1.to_vec::<i64>().unwrap();
    for (i, due) in reference["codes"].as_array().unwrap().iter().enumerate() {
        // scikit-learn's are one less, and −1 for an unknown one.
        assert_eq!(code(i), [1, due.as_f64().unwrap() as i64 + 1]);
    }
    assert_eq!(code(4), [1, 0]);
    let rows = "{\"n\": 3, \"b\": true}\n{\"n\": null, \"b\": false}\n{\"n\": 2.5, \"b\": [1]}\n";
    let rows = JsonLines::open(folder.file("rows.jsonl", rows)).unwrap();
    let fitted = TableColumns::new().category("n").category("b").fit(&(&rows).subset([0, 1]).unwrap()).unwrap();
    let categories = |i| fitted.row(rows.get(i).unwrap()).unwrap().1.to_vec::<i64>().unwrap();
    assert_eq!([categories(0), categories(1)], [[1, 2], [0, 1]]);
    let error = fitted.row(rows.get(2).unwrap()).unwrap_err().to_string();
    assert!(error.contains("rows.jsonl: line 3: field `n` is 2.5, no category"), "{error}");
}

#[test]
fn fitted_columns_are_saved_to_the_last_bit() {
    let folder = Folder::new("fitted");
    let text = "age,town,member,x\n30,Ulm,1,0.1\n,Bonn,0,0.2\n51,\"Ulm, old\",1,0.4\n";
    let rows = Csv::open(folder.file("a.csv", text)).unwrap();
    let columns = TableColumns::new()
        .flagged_number("age", MissingValues::Median, Scaling::Standard)
        .category("town")
        .number("x", MissingValues::Refuse, Scaling::Robust)
        .number("member", MissingValues::Constant(0.5), Scaling::None);
    let fitted = columns.fit(&rows).unwrap();
    fitted.save(folder.path("columns.json")).unwrap();
    let read = FittedColumns::open(folder.path("columns.json")).unwrap();
    assert_eq!(read, fitted);
    assert_eq!((read.width(), read.category_counts()), (4, vec![4]));
    let batch = Loader::new(rows.map(move |row| read.row(row))).batch(3).workers(2).stack().epoch(0).unwrap();
    let batch = batch.map(Result::unwrap).next().unwrap().data;
    assert_eq!((batch.0.dims(), batch.1.to_vec::<i64>().unwrap()), (&[3, 4][..], vec![2, 1, 3]));
    let numbers = batch.0.to_vec::<f32>().unwrap();
    assert_eq!([numbers[0], numbers[1], numbers[4], numbers[5], numbers[7]], [-1.0, 0.0, 0.0, 1.0, 0.0]);
    for text in [
        "",
        "{}",
        r#"{"columns": [{"name": "x"}]}"#,
        r#"{"columns": [{"name": "x", "fill": null, "center": 0, "scale": 0, "flag": false}]}"#,
        r#"{"columns": [{"name": "x", "fill": "1", "center": 0, "scale": 1, "flag": false}]}"#,
        r#"{"columns": [{"name": "x", "values": [1]}]}"#,
        r#"{"columns": [{"name": "x", "values": ["b", "a"]}]}"#,
    ] {
        let error = FittedColumns::open(folder.file("bad.json", text)).unwrap_err().to_string();
        assert!(error.contains("bad.json: it has no columns"), "{error}");
    }
    let none = r#"{"columns": []}"#;
    assert_eq!(FittedColumns::from_json("metadata", none).unwrap().width(), 0);
}

#[test]
fn rows_that_are_refused() {
    let folder = Folder::new("columns-refused");
    let text = "x,y,z,x2,w,w\n1,,a,NA,1,2\n2,,b, ,1,2\n3,,c,inf,1,2\n1e308,,c,4,1,2\n-1e308,,c,4,1,2\n";
    let rows = Csv::open(folder.file("a.csv", text)).unwrap();
    let fit = |name: &str, missing, count: usize| {
        TableColumns::new().number(name, missing, Scaling::Standard).fit(&(&rows).subset(0..count).unwrap())
    };
    for (name, count, due) in [
        ("none", 2, "a.csv: line 2: has no field `none`"),
        ("w", 2, "a.csv: line 2: has no field `w`"),
        ("y", 2, "column `y` has no number in 2 rows"),
        ("x", 0, "column `x` has no number in 0 rows"),
        ("z", 2, "a.csv: line 2: field `z` is \"a\", no finite number"),
        ("x2", 3, "a.csv: line 4: field `x2` is \"inf\", no finite number"),
        ("x", 5, "column `x` reaches from"),
    ] {
        let error = fit(name, MissingValues::Mean, count).unwrap_err();
        assert!(error.to_string().contains(due), "{error} should say {due}");
        assert_eq!(error.location().map(|at| at.file()), Some(file!()), "{error}");
    }
    let error = fit("x", MissingValues::Constant(f64::NAN), 2).unwrap_err().to_string();
    assert!(error.contains("column `x` has NaN for missing numbers"), "{error}");
    let plain = TableColumns::new().number("x", MissingValues::Refuse, Scaling::None).fit(&rows).unwrap();
    let error = plain.row(rows.get(3).unwrap()).unwrap_err().to_string();
    assert!(error.contains("a.csv: line 5: field `x` is 1") && error.contains("f32"), "{error}");
    // One row alone.
    let fitted = fit("x", MissingValues::Refuse, 1).unwrap();
    assert_eq!(fitted.row(rows.get(1).unwrap()).unwrap().0.to_vec::<f32>().unwrap(), [1.0]);
    let missing = Csv::open(folder.file("b.csv", "x\nNaN\n")).unwrap();
    let error = fitted.row(missing.get(0).unwrap()).unwrap_err();
    assert!(error.to_string().contains("b.csv: line 2: field `x` is missing, and no value stands for it"), "{error}");
    assert_eq!(error.location().map(|at| at.file()), Some(file!()), "{error}");
    assert_eq!(TableColumns::new().fit(&rows).unwrap().row(missing.get(0).unwrap()).unwrap().0.dims(), [0]);
}
