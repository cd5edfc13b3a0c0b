//! Columns of tables as inputs of a model: missing values, scales and categories, fitted on training rows.

use std::{collections::BTreeSet, path::Path};

use numcore::{Error, Result, Within, safetensors::replace_file};
use serde_json::{Value, json};

use crate::{
    Array, Dataset,
    sources::{Cell, TableRow},
};

/// The value that stands for a missing number: a blank field, `NA`, `null`, NaN.
#[derive(Clone, Copy, Debug, PartialEq)]
#[doc(alias("SimpleImputer"))]
#[doc(alias("fillna"))]
pub enum MissingValues {
    /// A missing number is an error.
    Refuse,
    /// The mean of the training rows.
    Mean,
    /// The median of the training rows.
    Median,
    /// This value.
    Constant(f64),
}

/// The scale of a column of numbers, from the values of the training rows that are not missing. A column of one value
/// alone is shifted, not scaled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scaling {
    /// The numbers as they are.
    None,
    /// `(x − mean) / standard deviation`: scikit-learn's `StandardScaler`.
    #[doc(alias("StandardScaler"))]
    Standard,
    /// `(x − least) / (greatest − least)`: scikit-learn's `MinMaxScaler`.
    #[doc(alias("MinMaxScaler"))]
    MinMax,
    /// `(x − median) / (75th − 25th percentile)`: scikit-learn's `RobustScaler`.
    #[doc(alias("RobustScaler"))]
    Robust,
}

/// The columns of a table that a model takes. [`fit`](TableColumns::fit) them on training rows alone.
///
/// ```
/// use data::{Dataset, Loader, columns::{FittedColumns, MissingValues, Scaling, TableColumns}, sources::Csv};
/// # fn main() -> numcore::Result<()> {
/// let folder = std::env::temp_dir();
/// # let path = folder.join("weftgrad-doc-columns.csv");
/// # std::fs::write(&path, "age,town,price\n30,Ulm,1\n,Bonn,2\n50,Ulm,3\n").unwrap();
/// let rows = Csv::open(&path)?; // age,town,price
/// let columns = TableColumns::new().number("age", MissingValues::Median, Scaling::Standard).category("town");
/// let fitted = columns.fit(&rows)?;
/// fitted.save(folder.join("columns.json"))?; // beside the model
///
/// let fitted = FittedColumns::open(folder.join("columns.json"))?;
/// let examples = rows.map(move |row| {
///     let price = row.number::<f32>("price")?;
///     let (numbers, categories) = fitted.row(row)?;
///     Ok((numbers, categories, price))
/// });
/// let (numbers, categories, prices) = Loader::new(examples).batch(3).stack().epoch(0)?.next().unwrap()?.data;
/// assert_eq!((numbers.dims(), categories.dims(), prices.dims()), (&[3, 1][..], &[3, 1][..], &[3][..]));
/// assert_eq!(categories.to_vec::<i64>()?, [2, 1, 2]); // 0 is for towns that no training row has
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
#[doc(alias("ColumnTransformer"))]
pub struct TableColumns {
    columns: Vec<Column>,
}

#[derive(Clone, Debug, PartialEq)]
enum Column {
    Number { name: String, missing: MissingValues, scaling: Scaling, flag: bool },
    Category { name: String },
}

impl TableColumns {
    /// No columns yet.
    pub fn new() -> Self {
        TableColumns::default()
    }

    /// Adds a column of numbers; a truth value is 0 or 1.
    pub fn number(self, name: &str, missing: MissingValues, scaling: Scaling) -> Self {
        self.with(Column::Number { name: name.into(), missing, scaling, flag: false })
    }

    /// Adds a column of numbers, and a second number behind it: 1 where it is missing, else 0.
    #[doc(alias("MissingIndicator"))]
    #[doc(alias("add_indicator"))]
    pub fn flagged_number(self, name: &str, missing: MissingValues, scaling: Scaling) -> Self {
        self.with(Column::Number { name: name.into(), missing, scaling, flag: true })
    }

    /// Adds a column of categories: text, whole numbers or truth values. The categories of the training rows, in order,
    /// are numbered from 1. All others are 0, as are missing ones.
    #[doc(alias("OrdinalEncoder"))]
    #[doc(alias("LabelEncoder"))]
    #[doc(alias("one_hot"))]
    pub fn category(self, name: &str) -> Self {
        self.with(Column::Category { name: name.into() })
    }

    fn with(mut self, column: Column) -> Self {
        self.columns.push(column);
        self
    }

    /// Reads all rows, for the numbers that stand for missing ones, the scales and the categories.
    ///
    /// # Errors
    /// Fails if a row cannot be read or has no such column, a number is no finite number, or a column of numbers has
    /// none.
    #[track_caller]
    pub fn fit<D: Dataset>(&self, rows: &D) -> Result<FittedColumns>
    where
        D::Example: Into<TableRow>,
    {
        let mut numbers = vec![Vec::new(); self.columns.len()];
        let mut names = vec![BTreeSet::new(); self.columns.len()];
        for index in 0..rows.len() {
            let row = rows.get(index).at_caller()?.into();
            for (i, column) in self.columns.iter().enumerate() {
                match column {
                    Column::Number { name, .. } => numbers[i].extend(number(&row, name).at_caller()?),
                    Column::Category { name } => names[i].extend(category(&row, name).at_caller()?),
                }
            }
        }
        let fit = |(i, column): (usize, &Column)| match column {
            Column::Category { name } => {
                Ok(Fitted::Category { name: name.clone(), values: std::mem::take(&mut names[i]).into_iter().collect() })
            }
            Column::Number { name, missing, scaling, flag } => {
                let mut values = std::mem::take(&mut numbers[i]);
                values.sort_unstable_by(f64::total_cmp);
                let (&[least, ..], &[.., greatest]) = (&values[..], &values[..]) else {
                    let why = format!("column `{name}` has no number in {} rows", rows.len());
                    return Err(Error::argument("TableColumns::fit", why));
                };
                let count = values.len() as f64;
                // Divided before they are added: sums of the largest numbers are finite then.
                let mean = values.iter().map(|x| x / count).sum::<f64>().clamp(least, greatest);
                let part = |part: f64| percentile(&values, part);
                let (center, scale) = match scaling {
                    Scaling::None => (0.0, 1.0),
                    Scaling::Standard => (mean, deviation(&values, mean)),
                    Scaling::MinMax => (least, greatest - least),
                    Scaling::Robust => (part(0.5), part(0.75) - part(0.25)),
                };
                if !scale.is_finite() {
                    let why = format!("column `{name}` reaches from {least} to {greatest}: no scale is finite");
                    return Err(Error::argument("TableColumns::fit", why));
                }
                if let MissingValues::Constant(value) = missing
                    && !value.is_finite()
                {
                    let why = format!("column `{name}` has {value} for missing numbers, which is not finite");
                    return Err(Error::argument("TableColumns::fit", why));
                }
                let fill = match *missing {
                    MissingValues::Refuse => None,
                    MissingValues::Mean => Some(mean),
                    MissingValues::Median => Some(part(0.5)),
                    MissingValues::Constant(value) => Some(value),
                };
                let scale = if scale > 0.0 && least < greatest { scale } else { 1.0 };
                Ok(Fitted::Number { name: name.clone(), fill, center, scale, flag: *flag })
            }
        };
        Ok(FittedColumns { columns: self.columns.iter().enumerate().map(fit).collect::<Result<_>>().at_caller()? })
    }
}

/// Columns with what was learned from training rows: [`TableColumns::fit`].
#[derive(Clone, Debug, PartialEq)]
pub struct FittedColumns {
    columns: Vec<Fitted>,
}

#[derive(Clone, Debug, PartialEq)]
enum Fitted {
    Number { name: String, fill: Option<f64>, center: f64, scale: f64, flag: bool },
    Category { name: String, values: Vec<String> },
}

impl FittedColumns {
    /// The numbers `[F]` of a row as `f32`, and its categories `[K]` as `i64`, both in the order of the columns.
    ///
    /// # Errors
    /// Fails if the row has no such column, a number is no finite number, or is missing where that is refused.
    #[track_caller]
    pub fn row(&self, row: impl Into<TableRow>) -> Result<(Array, Array)> {
        let (row, mut numbers, mut categories) = (row.into(), Vec::new(), Vec::new());
        for column in &self.columns {
            match column {
                Fitted::Number { name, fill, center, scale, flag } => {
                    let found = number(&row, name).at_caller()?;
                    let refused = || row.wrong(format!("field `{name}` is missing, and no value stands for it"));
                    let value = found.or(*fill).ok_or_else(refused).at_caller()?;
                    let scaled = ((value - center) / scale) as f32;
                    if !scaled.is_finite() {
                        let why = format!("field `{name}` is {value}, which no `f32` holds after scaling");
                        return Err(row.wrong(why)).at_caller();
                    }
                    numbers.push(scaled);
                    numbers.extend(flag.then_some(if found.is_none() { 1.0 } else { 0.0 }));
                }
                Fitted::Category { name, values } => {
                    let found = category(&row, name).at_caller()?.and_then(|found| values.binary_search(&found).ok());
                    categories.push(found.map_or(0, |at| at as i64 + 1));
                }
            }
        }
        Ok((Array::from_vec(numbers), Array::from_vec(categories)))
    }

    /// The number of numbers of a row: `F`, the width of the first layer.
    pub fn width(&self) -> usize {
        let width = |column: &Fitted| if let Fitted::Number { flag, .. } = column { 1 + usize::from(*flag) } else { 0 };
        self.columns.iter().map(width).sum()
    }

    /// The number of rows that the embedding of each column of categories needs: those of the training rows, and one
    /// for all others.
    pub fn category_counts(&self) -> Vec<usize> {
        let count =
            |column: &Fitted| if let Fitted::Category { values, .. } = column { Some(values.len() + 1) } else { None };
        self.columns.iter().filter_map(count).collect()
    }

    /// The columns as JSON, with all numbers to the last bit: for a file, or the metadata of a checkpoint.
    pub fn to_json(&self) -> String {
        let column = |column: &Fitted| match column {
            Fitted::Number { name, fill, center, scale, flag } => {
                json!({ "name": name, "fill": fill, "center": center, "scale": scale, "flag": flag })
            }
            Fitted::Category { name, values } => json!({ "name": name, "values": values }),
        };
        json!({ "columns": self.columns.iter().map(column).collect::<Vec<_>>() }).to_string()
    }

    /// Reads columns from what [`to_json`](FittedColumns::to_json) wrote. Errors name it `what`.
    ///
    /// # Errors
    /// Fails if the text is no JSON of columns.
    #[track_caller]
    pub fn from_json(what: &str, text: &str) -> Result<Self> {
        let read = || -> Option<Vec<Fitted>> {
            let all: Value = serde_json::from_str(text).ok()?;
            let column = |column: &Value| {
                let name = column.get("name")?.as_str()?.to_owned();
                let number = |key: &str| column.get(key)?.as_f64();
                if let Some(values) = column.get("values") {
                    let values = values.as_array()?.iter().map(|value| Some(value.as_str()?.to_owned()));
                    let values: Vec<String> = values.collect::<Option<_>>()?;
                    return values.is_sorted().then_some(Fitted::Category { name, values });
                }
                let fill = column.get("fill").filter(|fill| !fill.is_null());
                let fill = if let Some(fill) = fill { Some(fill.as_f64()?) } else { None };
                let scale = number("scale").filter(|&scale| scale > 0.0)?;
                Some(Fitted::Number {
                    name,
                    fill,
                    center: number("center")?,
                    scale,
                    flag: column.get("flag")?.as_bool()?,
                })
            };
            all.get("columns")?.as_array()?.iter().map(column).collect()
        };
        let why = "it has no columns as `FittedColumns::to_json` writes them";
        Ok(FittedColumns { columns: read().ok_or_else(|| Error::format(what, why)).at_caller()? })
    }

    /// Writes the columns to a JSON file, which is replaced once the new one is complete.
    ///
    /// # Errors
    /// Fails if the file cannot be written.
    #[track_caller]
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        replace_file(path, self.to_json().as_bytes()).at_caller()
    }

    /// Reads the columns from a JSON file.
    ///
    /// # Errors
    /// Fails if the file cannot be read, or has no columns.
    #[track_caller]
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let text = std::fs::read_to_string(path).map_err(|e| Error::io(path, e)).at_caller()?;
        FittedColumns::from_json(&path.display().to_string(), &text).at_caller()
    }
}

/// The texts of missing values, but for the empty one.
const MISSING: [&str; 6] = ["NA", "N/A", "NaN", "nan", "null", "NULL"];

/// The number in a field; `None` if it is missing.
fn number(row: &TableRow, name: &str) -> Result<Option<f64>> {
    let cell = row.field(name)?;
    let number = match cell {
        Cell::Null => None,
        Cell::Bool(x) => Some(f64::from(u8::from(*x))),
        Cell::Int(x) => Some(*x as f64),
        Cell::Float(x) => Some(*x).filter(|x| !x.is_nan()),
        Cell::Text(text) if text.trim().is_empty() || MISSING.contains(&text.trim()) => None,
        Cell::Text(text) => Some(text.trim().parse().unwrap_or(f64::NAN)),
        _ => Some(f64::NAN),
    };
    if number.is_some_and(|x| !x.is_finite()) {
        return Err(row.wrong(format!("field `{name}` is {cell}, no finite number")));
    }
    Ok(number)
}

/// The category in a field; `None` if it is missing.
fn category(row: &TableRow, name: &str) -> Result<Option<String>> {
    match row.field(name)? {
        Cell::Null => Ok(None),
        Cell::Text(text) => Ok(Some(text.trim().to_owned()).filter(|text| !text.is_empty())),
        cell @ (Cell::Int(_) | Cell::Bool(_)) => Ok(Some(cell.to_string())),
        other => Err(row.wrong(format!("field `{name}` is {other}, no category"))),
    }
}

/// The standard deviation of all values, not of a sample.
fn deviation(values: &[f64], mean: f64) -> f64 {
    (values.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / values.len() as f64).sqrt()
}

/// The value below which a part of the sorted values is, interpolated linearly.
fn percentile(values: &[f64], part: f64) -> f64 {
    let place = part * (values.len() - 1) as f64;
    let (low, high) = (values[place.floor() as usize], values[place.ceil() as usize]);
    low + (high - low) * place.fract()
}
