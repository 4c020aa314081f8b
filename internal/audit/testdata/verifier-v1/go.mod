module bivy

go 1.26
