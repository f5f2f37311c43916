"""The small trained pipeline that ships with the project: its pictures, its prompts and a measure of its meaning."""
