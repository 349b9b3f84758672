from tacita.cli import main

main()
